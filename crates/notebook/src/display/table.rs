//! Tables as HTML and as text.

use std::fmt::Write;

use brigade_plot::escape_markup;
use brigade_rank_env::text::escaped;

/// Rows of texts below a row of names. Every row has as many texts as there are names. Control characters are escaped
/// in all of them.
#[derive(Debug, Default)]
pub(super) struct Table {
    names: Vec<String>,
    rows: Vec<Vec<String>>,
    /// `true` if the first column names the rows.
    named_rows: bool,
}

impl Table {
    pub(super) fn new(names: Vec<String>, rows: Vec<Vec<String>>) -> Self {
        let line = |texts: Vec<String>| {
            texts.iter().map(|text| escaped(text).to_string()).collect::<Vec<String>>()
        };
        Self { names: line(names), rows: rows.into_iter().map(line).collect(), named_rows: false }
    }

    /// Makes the first column the names of the rows.
    pub(super) fn named_rows(mut self) -> Self {
        self.named_rows = true;
        self
    }

    /// Returns the table as HTML with the classes of pandas' tables, for which notebooks have a style.
    pub(super) fn html(&self) -> String {
        let mut html = String::from("<table border=\"1\" class=\"dataframe\">\n<thead>\n<tr>");
        for name in &self.names {
            let _ = write!(html, "<th>{}</th>", escape_markup(name));
        }
        html.push_str("</tr>\n</thead>\n<tbody>\n");
        for row in &self.rows {
            html.push_str("<tr>");
            for (column, text) in row.iter().enumerate() {
                let tag = if self.named_rows && column == 0 { "th" } else { "td" };
                let _ = write!(html, "<{tag}>{}</{tag}>", escape_markup(text));
            }
            html.push_str("</tr>\n");
        }
        html.push_str("</tbody>\n</table>\n");
        html
    }

    /// Returns the table as text in right-aligned columns of equal width.
    pub(super) fn text(&self) -> String {
        let lines: Vec<&Vec<String>> = std::iter::once(&self.names).chain(&self.rows).collect();
        let width = |column: usize| {
            let texts = lines.iter().filter_map(|line| line.get(column));
            texts.map(|it| it.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.names.len()).map(width).collect();
        let mut text = String::new();
        for line in lines {
            let cells = line.iter().zip(&widths).map(|(cell, width)| format!("{cell:>width$}"));
            text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
            text.push('\n');
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owned(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|it| (*it).to_owned()).collect()
    }

    #[test]
    fn a_table_is_aligned_and_escaped() {
        let rows = vec![owned(&["0", "<b>"]), owned(&["10", "a & b"])];
        let table = Table::new(owned(&["n", "\"é\""]), rows).named_rows();
        assert_eq!(table.text(), " n    \"é\"\n 0    <b>\n10  a & b\n");
        assert_eq!(
            table.html(),
            "<table border=\"1\" class=\"dataframe\">\n<thead>\n\
             <tr><th>n</th><th>&quot;é&quot;</th></tr>\n</thead>\n<tbody>\n\
             <tr><th>0</th><td>&lt;b&gt;</td></tr>\n<tr><th>10</th><td>a &amp; b</td></tr>\n\
             </tbody>\n</table>\n"
        );
    }

    #[test]
    fn a_cell_is_one_line_that_no_terminal_obeys() {
        let table = Table::new(owned(&["a\u{202e}b"]), vec![owned(&["\x1b[2J<b>\nc"])]);
        let cell = r"\u{1b}[2J<b>\nc";
        assert_eq!(table.text(), format!("{:>15}\n{cell}\n", r"a\u{202e}b"));
        let html = table.html();
        assert!(html.contains(r"<th>a\u{202e}b</th>"), "{html}");
        assert!(html.contains(&format!("<td>{}</td>", escape_markup(cell))), "{html}");
    }
}
