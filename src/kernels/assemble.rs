//! Constants, fragments and a kernel's file become one WGSL text.
//!
//! Joining is plain concatenation, but that lines `enable NAME;` go to the top, where WGSL wants them. One more thing is done, since some compilers do it badly: a loop that
//! carries the comment `// @unroll` on the line before is written out. Such a loop has the form
//! `for (var i = START; i < END; i++) {` (or `i += STEP`), with bounds made of literals, constants of the
//! prelude and the file, the variables of loops around it that are being written out, and `+ - * / %`. In each copy of its
//! body, in a block of its own, the variable becomes a literal. Without the marks the text means the same.

use std::fmt;

/// Why a marked loop could not be written out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AssembleError {
    /// Line in the joined text, from 1.
    pub line: usize,
    /// What is wrong.
    pub reason: String,
}

impl fmt::Display for AssembleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.reason)
    }
}

impl std::error::Error for AssembleError {}

/// A body is never copied more often than this: a bound typed wrong must not eat the memory.
const MOST_COPIES: u32 = 4096;

type Consts<'a> = Vec<(&'a str, u32)>;

pub(super) fn assemble(
    consts: &[(&'static str, u32)],
    parts: &[&str],
) -> Result<String, AssembleError> {
    let mut text = String::new();
    let mut extensions: Vec<&str> = parts.iter().flat_map(|part| enabled(part)).collect();
    extensions.sort_unstable();
    extensions.dedup();
    for extension in extensions {
        text.push_str(&format!("enable {extension};\n"));
    }
    for (name, value) in consts {
        text.push_str(&format!("const {name}: u32 = {value}u;\n"));
    }
    for part in parts {
        text.push('\n');
        for line in part.split_inclusive('\n') {
            text.push_str(if extension(line).is_some() {
                "\n"
            } else {
                line
            });
        }
    }
    let lines: Vec<(usize, &str)> = text.lines().enumerate().map(|(n, l)| (n + 1, l)).collect();
    let mut out = String::with_capacity(text.len());
    let mut known: Consts = consts.to_vec();
    for (_, line) in &lines {
        if let Some((name, expression)) = constant(line)
            && !is_loop_variable(name)
            && let Ok(value) = evaluate(expression, &known)
        {
            known.push((name, value));
        }
    }
    expand(&lines, &mut known, &mut out)?;
    Ok(out)
}

/// The extension that a line `enable NAME;` asks for.
fn extension(line: &str) -> Option<&str> {
    line.trim_end().strip_prefix("enable ")?.strip_suffix(';')
}

/// The extensions that a text asks for.
pub(super) fn enabled(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter_map(extension)
}

/// The name and the value of a line `const NAME: u32 = VALUE;`: a bound may name it too.
fn constant(line: &str) -> Option<(&str, &str)> {
    let declaration = line.strip_prefix("const ")?.strip_suffix(';')?;
    let (name, expression) = declaration.split_once(": u32 =")?;
    Some((name.trim(), expression))
}

/// Copies `lines`, writing out what is marked. `known` holds the constants and the variables of the loops around.
fn expand<'a>(
    lines: &[(usize, &'a str)],
    known: &mut Consts<'a>,
    out: &mut String,
) -> Result<(), AssembleError> {
    let mut at = 0;
    while at < lines.len() {
        let (number, line) = lines[at];
        if line.trim() != "// @unroll" {
            out.push_str(&substitute(line, known));
            out.push('\n');
            at += 1;
            continue;
        }
        let fail = |reason: String| AssembleError {
            line: number + 1,
            reason,
        };
        let header = lines.get(at + 1).map_or("", |(_, line)| *line);
        let loop_ = Loop::parse(header, known).map_err(fail)?;
        let length = body_length(&lines[at + 2..])
            .ok_or_else(|| fail("the loop's closing brace is missing".into()))?;
        let body = &lines[at + 2..at + 2 + length];

        let mut value = loop_.start;
        let mut copies = 0;
        while value < loop_.end {
            copies += 1;
            if copies > MOST_COPIES {
                return Err(fail(format!("more than {MOST_COPIES} copies")));
            }
            out.push_str("{\n");
            known.push((loop_.variable, value));
            expand(body, known, out)?;
            known.pop();
            out.push_str("}\n");
            value += loop_.step;
        }
        at += length + 3;
    }
    Ok(())
}

/// The lines before the brace that closes a block which is already open.
fn body_length(lines: &[(usize, &str)]) -> Option<usize> {
    let mut depth = 1u32;
    for (at, (_, line)) in lines.iter().enumerate() {
        let code = line.split("//").next().unwrap_or("").trim();
        for brace in code.chars().filter(|c| "{}".contains(*c)) {
            depth = if brace == '{' { depth + 1 } else { depth - 1 };
            if depth == 0 {
                // The brace stands on a line of its own, or the loop has not the form that can be written out.
                return (code == "}").then_some(at);
            }
        }
    }
    None
}

/// `for (var NAME = START; NAME < END; NAME++) {`
struct Loop<'a> {
    variable: &'a str,
    start: u32,
    end: u32,
    step: u32,
}

impl<'a> Loop<'a> {
    fn parse(line: &'a str, known: &Consts) -> Result<Self, String> {
        let wrong = || {
            format!(
                "after `// @unroll`: expected `for (var i = START; i < END; i++) {{`, got `{}`",
                line.trim()
            )
        };
        let inner = line.trim().strip_prefix("for (var ").ok_or_else(wrong)?;
        let inner = inner.strip_suffix(") {").ok_or_else(wrong)?;
        let parts: Vec<&str> = inner.split(';').map(str::trim).collect();
        let [start, end, step] = parts[..] else {
            return Err(wrong());
        };
        let (variable, start) = start.split_once('=').ok_or_else(wrong)?;
        let variable = variable.trim();
        let end = end.strip_prefix(variable).ok_or_else(wrong)?.trim();
        let end = end.strip_prefix('<').ok_or_else(wrong)?;
        let step = step.strip_prefix(variable).ok_or_else(wrong)?.trim();
        let step = match step.strip_prefix("+=") {
            Some(step) => evaluate(step, known)?,
            None if step == "++" => 1,
            None => return Err(wrong()),
        };
        if step == 0 {
            return Err("a step of 0 never ends".into());
        }
        Ok(Loop {
            variable,
            start: evaluate(start, known)?,
            end: evaluate(end, known)?,
            step,
        })
    }
}

/// The line with every known loop variable as a literal, and without its comment.
fn substitute(line: &str, known: &Consts) -> String {
    let code = match line.split_once("//") {
        // Outside a loop that is written out a comment stays where it is.
        Some((code, _)) if known.iter().any(|(name, _)| is_loop_variable(name)) => code.trim_end(),
        _ => return replace(line, known),
    };
    replace(code, known)
}

/// Constants are upper case and stay names; loop variables are lower case and become literals.
fn is_loop_variable(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_lowercase())
}

fn replace(code: &str, known: &Consts) -> String {
    let mut out = String::with_capacity(code.len());
    for token in tokens(code) {
        match known.iter().rev().find(|(name, _)| *name == token) {
            // `point.x` is a member, not the variable `x`.
            Some((name, value)) if is_loop_variable(name) && !out.ends_with('.') => {
                out.push_str(&format!("{value}u"));
            }
            _ => out.push_str(token),
        }
    }
    out
}

/// Words (names and numbers) and single other characters, in order; joined again they are the text.
pub(super) fn tokens(code: &str) -> impl Iterator<Item = &str> {
    let word = |c: char| c.is_alphanumeric() || c == '_';
    let mut rest = code;
    std::iter::from_fn(move || {
        let first = rest.chars().next()?;
        let length = if word(first) {
            rest.find(|c| !word(c)).unwrap_or(rest.len())
        } else {
            first.len_utf8()
        };
        let (token, tail) = rest.split_at(length);
        rest = tail;
        Some(token)
    })
}

/// A sum of products of numbers and known names, left to right: all that loop bounds need.
fn evaluate(expression: &str, known: &Consts) -> Result<u32, String> {
    let fail = |why: &str| format!("bound `{}`: {why}", expression.trim());
    let value_of = |token: &str| -> Result<u32, String> {
        if let Some((_, value)) = known.iter().rev().find(|(name, _)| *name == token) {
            return Ok(*value);
        }
        let digits = token.strip_suffix('u').unwrap_or(token);
        digits.parse().map_err(|_| {
            fail(&format!(
                "`{token}` is neither a number nor a constant of the prelude"
            ))
        })
    };
    let mut sum: Option<u32> = None;
    let mut product: Option<u32> = None;
    let mut sum_sign = '+';
    let mut operator = ' ';
    let add = |sum: Option<u32>, sign: char, term: u32| match sign {
        '-' => sum.unwrap_or(0).checked_sub(term),
        _ => sum.unwrap_or(0).checked_add(term),
    };
    for token in tokens(expression).filter(|token| !token.trim().is_empty()) {
        match (token, product) {
            ("*" | "/" | "%", Some(_)) => operator = token.chars().next().unwrap_or(' '),
            ("+" | "-", Some(term)) => {
                sum = Some(add(sum, sum_sign, term).ok_or_else(|| fail("out of range"))?);
                sum_sign = token.chars().next().unwrap_or(' ');
                product = None;
            }
            (_, None) => product = Some(value_of(token)?),
            (_, Some(left)) => {
                let right = value_of(token)?;
                let value = match operator {
                    '*' => left.checked_mul(right),
                    '/' => left.checked_div(right),
                    '%' => left.checked_rem(right),
                    _ => return Err(fail("an operator is missing")),
                };
                product = Some(value.ok_or_else(|| fail("out of range"))?);
                operator = ' ';
            }
        }
    }
    let term = product.ok_or_else(|| fail("a value is missing"))?;
    if operator != ' ' {
        return Err(fail("a value is missing"));
    }
    add(sum, sum_sign, term).ok_or_else(|| fail("out of range"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn text(consts: &[(&'static str, u32)], source: &str) -> Result<String, AssembleError> {
        assemble(consts, &[source])
    }

    #[test]
    fn a_marked_loop_is_written_out_and_others_are_left() {
        let got = text(
            &[("N", 2)],
            "// @unroll\nfor (var i = 0u; i < N; i++) {\n  a[i] = b.i + iota; // i\n}\nfor (var i = 0u; i < N; i++) {\n  c[i] = N;\n}\n",
        )
        .unwrap();
        assert_eq!(
            got,
            "const N: u32 = 2u;\n\n{\n  a[0u] = b.i + iota;\n}\n{\n  a[1u] = b.i + iota;\n}\nfor (var i = 0u; i < N; i++) {\n  c[i] = N;\n}\n"
        );
    }

    #[test]
    fn constants_in_lower_case_stay_names() {
        let source = "const width: u32 = 600u;\n// @unroll\nfor (var i = 0u; i < 1u; i++) {\nf(i, width);\n}\n";
        let got = text(&[], source).unwrap();
        assert!(
            got.contains("const width") && got.contains("f(0u, width);"),
            "{got}"
        );
    }

    #[test]
    fn bounds_may_name_constants_of_the_file() {
        let got = text(
            &[("N", 4)],
            "const HALF: u32 = N / 2u;\nconst OTHER: u32 = max(N, 9u);\n// @unroll\nfor (var i = 0u; i < HALF; i++) {\nf(i, HALF);\n}\n",
        )
        .unwrap();
        assert!(
            got.contains("f(1u, HALF);") && !got.contains("f(2u"),
            "{got}"
        );
    }

    #[test]
    fn inner_bounds_may_use_outer_variables() {
        let got = text(
            &[("N", 4)],
            "// @unroll\nfor (var i = 1u; i < N; i += 2u) {\n// @unroll\nfor (var j = i; j < i + 1u; j++) {\nf(i, j);\n}\n}\n",
        )
        .unwrap();
        assert_eq!(
            got.lines()
                .filter(|line| line.starts_with('f'))
                .collect::<Vec<_>>(),
            ["f(1u, 1u);", "f(3u, 3u);"]
        );
    }

    #[test]
    fn a_loop_over_nothing_disappears() {
        let got = text(
            &[("N", 0)],
            "// @unroll\nfor (var i = 0u; i < N; i++) {\nx(i);\n}\nend\n",
        )
        .unwrap();
        assert!(!got.contains('x') && got.contains("end"), "{got}");
    }

    #[test]
    fn a_marked_loop_of_another_form_is_an_error_with_its_line() {
        struct Case {
            source: &'static str,
            reason: &'static str,
        }
        let cases = [
            Case {
                source: "// @unroll\nwhile (true) {\n}\n",
                reason: "expected `for",
            },
            Case {
                source: "// @unroll",
                reason: "expected `for",
            },
            Case {
                source: "// @unroll\nfor (var i = 0u; i < M; i++) {\n}\n",
                reason: "`M` is neither",
            },
            Case {
                source: "// @unroll\nfor (var i = 0u; i < N; i += 0u) {\n}\n",
                reason: "never ends",
            },
            Case {
                source: "// @unroll\nfor (var i = 0u; i < N; i++) {\n",
                reason: "closing brace",
            },
            Case {
                source: "// @unroll\nfor (var i = 0u; i < N; i++) {\n} else {\n}\n",
                reason: "closing brace",
            },
            Case {
                source: "// @unroll\nfor (var i = 0u; i < 99999u; i++) {\n}\n",
                reason: "more than 4096",
            },
            Case {
                source: "// @unroll\nfor (var i = 0u; i < N - 9u; i++) {\n}\n",
                reason: "out of range",
            },
            Case {
                source: "// @unroll\nfor (var i = 0u; i < N *; i++) {\n}\n",
                reason: "missing",
            },
        ];
        for case in cases {
            let error = text(&[("N", 2)], case.source).unwrap_err();
            assert!(
                error.reason.contains(case.reason),
                "{}: {error}",
                case.source
            );
            assert_eq!(error.line, 4, "{}", case.source);
        }
    }

    #[test]
    fn bounds_are_sums_of_products() {
        let known = vec![("N", 6)];
        for (expression, value) in [
            ("2u * N + 3u", 15),
            ("N / 4u", 1),
            ("N % 4u - 1u", 1),
            ("7", 7),
            ("1 + 2 * N", 13),
        ] {
            assert_eq!(evaluate(expression, &known), Ok(value), "{expression}");
        }
    }
}
