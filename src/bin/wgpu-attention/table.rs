//! Tables for the terminal, for markdown and as CSV.

use clap::ValueEnum;
use comfy_table::{CellAlignment, ContentArrangement, Table as Terminal, presets};
use wgpu_attention::results::visible;

/// How results are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// For the terminal
    Table,
    /// A table in markdown
    Markdown,
    /// One JSON document
    Json,
    /// Comma-separated values, in seconds and units without a prefix
    Csv,
}

/// Rows under headers. Cells are shown as they are, but for characters that would do something else than be shown.
pub(crate) struct Table {
    headers: Vec<String>,
    rows: Vec<Vec<String>>,
    /// The columns that hold words; the others hold numbers.
    words: Vec<usize>,
}

impl Table {
    /// `words`: the columns that hold words and not numbers.
    pub(crate) fn new(headers: &[&str], words: &[usize]) -> Self {
        let headers = headers.iter().map(|header| header.to_string());
        Self::named(headers.collect(), words)
    }

    /// The same with headers that are made up.
    pub(crate) fn named(headers: Vec<String>, words: &[usize]) -> Self {
        Table {
            headers,
            rows: Vec::new(),
            words: words.to_vec(),
        }
    }

    pub(crate) fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    pub(crate) fn markdown(&self) -> String {
        let line = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
        let rules = (0..self.headers.len()).map(|column| match self.words.contains(&column) {
            true => "---".to_string(),
            false => "---:".to_string(),
        });
        let rows = self.rows.iter();
        let rows = rows.map(|row| line(row.iter().map(|cell| escaped_markdown(cell)).collect()));
        line(self.headers.clone()) + &line(rules.collect()) + &rows.collect::<String>()
    }

    pub(crate) fn csv(&self) -> String {
        let mut writer = csv::Writer::from_writer(Vec::new());
        // (Writing to memory does not fail, and every row has as many cells as there are headers.)
        let _ = writer.write_record(&self.headers);
        for row in &self.rows {
            let _ = writer.write_record(row.iter().map(|cell| visible(cell)));
        }
        String::from_utf8_lossy(&writer.into_inner().unwrap_or_default()).into_owned()
    }

    /// Columns as wide as they need to be; where that is wider than the terminal, cells are broken.
    pub(crate) fn terminal(&self) -> String {
        let mut table = Terminal::new();
        table.load_style(presets::NOTHING);
        table.set_content_arrangement(ContentArrangement::Dynamic);
        table.set_header(self.headers.iter());
        for row in &self.rows {
            table.add_row(row.iter().map(|cell| visible(cell)));
        }
        for (number, column) in table.column_iter_mut().enumerate() {
            column.set_padding((0, 2));
            if !self.words.contains(&number) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        let lines = table.lines().map(|line| line.trim_end().to_string() + "\n");
        lines.collect()
    }
}

/// [`visible`], and without what markdown would take for its own.
pub(crate) fn escaped_markdown(text: &str) -> String {
    let mut shown = String::new();
    for letter in visible(text).chars() {
        match letter {
            '<' => shown.push_str("&lt;"),
            '>' => shown.push_str("&gt;"),
            '&' => shown.push_str("&amp;"),
            '|' | '\\' | '`' | '*' | '_' | '[' | ']' | '#' | '~' | '!' => {
                shown.push('\\');
                shown.push(letter);
            }
            letter => shown.push(letter),
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hostile() -> Table {
        let mut table = Table::new(&["name", "ms"], &[0]);
        table.row(vec![
            "A \"b\", c | <i>\u{1b}[2J\u{202e}".into(),
            "1.5".into(),
        ]);
        table
    }

    #[test]
    fn other_peoples_names_are_shown_and_not_obeyed() {
        assert_eq!(
            hostile().markdown(),
            "| name | ms |\n| --- | ---: |\n| A \"b\", c \\| &lt;i&gt;\\\\u{1b}\\[2J\\\\u{202e} | 1.5 |\n"
        );
        assert_eq!(
            hostile().csv(),
            "name,ms\n\"A \"\"b\"\", c | <i>\\u{1b}[2J\\u{202e}\",1.5\n"
        );
        let terminal = hostile().terminal();
        assert!(
            terminal.contains("A \"b\", c | <i>\\u{1b}[2J\\u{202e}"),
            "{terminal}"
        );
    }
}
