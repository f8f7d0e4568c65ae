//! Words and numbers as a report shows them: other people's names made harmless, figures short, labels cut to a width.

/// The longest name that is shown as a whole, in characters.
const MOST_CHARACTERS: usize = 400;

/// Somebody else's words on one line, cut where they are very long.
pub(super) fn plain(text: &str) -> String {
    let mut letters = text.char_indices().skip(MOST_CHARACTERS);
    match letters.next() {
        Some((end, _)) => visible(&text[..end]) + "…",
        None => visible(text),
    }
}

/// Somebody else's words (names of adapters and drivers, text of a file) on one line: what has no shape of its own, what a terminal would
/// obey, and what turns the direction of the text behind it is shown by its number.
///
/// ```
/// use wgpu_attention::results::visible;
///
/// assert_eq!(visible("name\u{1b}[2J"), "name\\u{1b}[2J");
/// ```
pub fn visible(text: &str) -> String {
    let mut shown = String::new();
    for char in text.chars() {
        match char {
            '\t' | '\n' | '\r' => shown.push(' '),
            char if is_hidden(char) => shown.extend(char.escape_unicode()),
            char => shown.push(char),
        }
    }
    shown
}

/// Control characters, marks of direction, and what no XML file may hold.
fn is_hidden(char: char) -> bool {
    char.is_control()
        || matches!(char,
            '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}'
            | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{fffe}' | '\u{ffff}' | '\u{e0000}'..='\u{e007f}')
}

/// A figure of three digits, or as many as the whole part has: `0.0123`, `4.56`, `30,123`, `1.00e12`.
pub(super) fn number(value: f64) -> String {
    let size = value.abs();
    if !value.is_finite() {
        return "–".into();
    }
    if value == 0.0 {
        return "0".into();
    }
    if !(0.001..1e7).contains(&size) {
        return format!("{value:.2e}");
    }
    let decimals = (2.0 - size.log10().floor()).max(0.0) as usize;
    grouped(&format!("{value:.decimals$}"))
}

/// A mark of an axis, `digit * 10^exponent`: `0.05`, `200`, `10,000`, `1e6`.
pub(super) fn tick(digit: u32, exponent: i32) -> String {
    match exponent {
        0..=5 => grouped(&format!("{digit}{}", "0".repeat(exponent as usize))),
        -3..0 => {
            let decimals = exponent.unsigned_abs() as usize;
            format!("{:.decimals$}", f64::from(digit) * 10f64.powi(exponent))
        }
        _ => format!("{digit}e{exponent}"),
    }
}

/// With a comma between thousands, from five digits on.
fn grouped(digits: &str) -> String {
    let (whole, rest) = match digits.find('.') {
        Some(at) => digits.split_at(at),
        None => (digits, ""),
    };
    let length = whole.trim_start_matches('-').len();
    if length < 5 {
        return digits.into();
    }
    let mut grouped = String::new();
    for (at, char) in whole.chars().enumerate() {
        let left = whole.len() - at;
        if left.is_multiple_of(3) && left <= length && left < whole.len() && at > 0 {
            grouped.push(',');
        }
        grouped.push(char);
    }
    grouped + rest
}

/// A time in milliseconds, with its unit.
pub(super) fn milliseconds(seconds: f64) -> String {
    // (The longest time that a file may hold is no number of milliseconds.)
    format!("{} ms", number((seconds * 1e3).min(f64::MAX)))
}

/// A share in percent, with its unit.
pub(super) fn percent(share: f64) -> String {
    let percent = (share * 100.0).min(f64::MAX);
    match percent.abs() {
        small if small > 0.0 && small < 0.1 => "< 0.1 %".into(),
        small if small < 10.0 => format!("{percent:.1} %"),
        large if large < 1e5 => format!("{percent:.0} %"),
        _ => format!("{percent:.0e} %"),
    }
}

/// "1 case", "2 cases".
pub(super) fn count(number: usize, one: &str, many: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { many })
}

/// About how wide a text is at most, in the widest of the fonts that a browser may take, as a share of the font's size.
fn ems(char: char) -> f64 {
    match char {
        'i' | 'j' | 'l' | 'I' | '.' | ',' | ':' | ';' | '\'' | '|' | '!' | ' ' | '·' => 0.36,
        'f' | 't' | 'r' | '(' | ')' | '-' | '/' | '[' | ']' => 0.44,
        'm' | 'w' | 'M' | 'W' | '@' | '%' | '…' => 1.0,
        'A'..='Z' => 0.76,
        '\0'..='~' => 0.65,
        _ => 1.05,
    }
}

/// About how wide a text is at most, in pixels.
pub(super) fn width(text: &str, font: i32) -> i32 {
    (text.chars().map(ems).sum::<f64>() * f64::from(font)).ceil() as i32
}

/// A [`plain`] text in lines of a width; what is too long for them ends in an ellipsis.
pub(super) fn wrap(text: &str, font: i32, most: i32, most_lines: usize) -> Vec<String> {
    let text = plain(text);
    let mut lines: Vec<String> = vec![String::new()];
    let mut rest = text.split_inclusive([' ', '-', '/']).collect::<Vec<_>>();
    rest.reverse();
    while let Some(word) = rest.pop() {
        let is_last = lines.len() == most_lines;
        let Some(line) = lines.last_mut() else { break };
        if width(&format!("{line}{}", word.trim_end()), font) <= most {
            line.push_str(word);
            continue;
        }
        if is_last {
            line.push_str(word);
            cut(line, font, most);
            break;
        }
        if !line.is_empty() {
            lines.push(String::new());
            rest.push(word);
            continue;
        }
        // A word that is longer than a line.
        let fits = word
            .char_indices()
            .take_while(|(at, char)| width(&word[..at + char.len_utf8()], font) <= most)
            .last()
            .map_or(0, |(at, char)| at + char.len_utf8());
        // (One character at least, or there would be no end.)
        let at = fits.max(word.chars().next().map_or(0, char::len_utf8));
        line.push_str(&word[..at]);
        if at < word.len() {
            rest.push(&word[at..]);
            lines.push(String::new());
        }
    }
    let trimmed = lines.iter().map(|line| line.trim().to_string());
    trimmed.filter(|line| !line.is_empty()).collect()
}

/// Ends a line that is too long in an ellipsis.
fn cut(line: &mut String, font: i32, most: i32) {
    while width(line, font) + font > most && !line.is_empty() {
        line.pop();
    }
    line.push('…');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_short() {
        let shown = [
            0.0,
            1e-300,
            0.00123,
            0.0123,
            4.561,
            45.61,
            456.1,
            4561.0,
            30_123.4,
            1_234_567.0,
            1e300,
        ]
        .map(number);
        assert_eq!(
            shown,
            [
                "0",
                "1.00e-300",
                "0.00123",
                "0.0123",
                "4.56",
                "45.6",
                "456",
                "4561",
                "30,123",
                "1,234,567",
                "1.00e300"
            ]
        );
        assert_eq!(
            [(1, 0), (5, -2), (2, 2), (1, 4), (1, 6), (1, 9), (1, -4)].map(|(d, e)| tick(d, e)),
            ["1", "0.05", "200", "10,000", "1e6", "1e9", "1e-4"]
        );
        assert_eq!(
            [1e-9, 0.0153, 0.153, 1.0, 1e300].map(percent),
            ["< 0.1 %", "1.5 %", "15 %", "100 %", "1e302 %"]
        );
        assert_eq!(milliseconds(f64::MAX), format!("{:.2e} ms", f64::MAX));
    }

    #[test]
    fn what_is_hidden_is_shown_by_its_number() {
        assert_eq!(plain("a\u{202e}b\0c\nd"), "a\\u{202e}b\\u{0}c d");
        assert_eq!(plain("<b>&\"é漢"), "<b>&\"é漢");
        assert_eq!(
            plain(&"x".repeat(5000)).chars().count(),
            MOST_CHARACTERS + 1
        );
    }

    #[test]
    fn lines_keep_to_their_width() {
        let long = "a name of several words and one_that_has_no_end_at_all_whatever_the_width_is 漢字漢字漢字漢字";
        for most in [0, 5, 40, 100, 300, 5000] {
            for lines in [1, 2, 3, 100] {
                let wrapped = wrap(long, 12, most, lines);
                assert!(wrapped.len() <= lines.max(1), "{wrapped:?}");
                for line in wrapped.iter().filter(|_| most >= 40) {
                    assert!(width(line, 12) <= most, "{most}: {line}");
                }
            }
        }
        assert_eq!(wrap("short", 12, 100, 2), ["short"]);
        assert!(wrap("", 12, 100, 2).is_empty());
        assert!(wrap(long, 12, 100, 1)[0].ends_with('…'));
    }
}
