//! Table to log.

use crate::{Result, TrackError, Value};

/// Table of values with named columns.
#[derive(Debug, Clone, PartialEq)]
pub struct Table {
    columns: Vec<String>,
    rows: Vec<Vec<Value>>,
}

impl Table {
    /// Creates a table. Every row has one cell per column.
    ///
    /// # Errors
    /// [`TrackError::Row`] for the first row with another number of cells.
    pub fn new<C: Into<String>>(
        columns: impl IntoIterator<Item = C>,
        rows: Vec<Vec<Value>>,
    ) -> Result<Self> {
        let columns: Vec<String> = columns.into_iter().map(Into::into).collect();
        match rows.iter().position(|row| row.len() != columns.len()) {
            Some(row) => {
                Err(TrackError::Row { row, expected: columns.len(), found: rows[row].len() })
            }
            None => Ok(Self { columns, rows }),
        }
    }

    /// Returns the names of the columns.
    #[must_use]
    pub fn columns(&self) -> &[String] {
        &self.columns
    }

    /// Returns the rows, each with one value per column.
    #[must_use]
    pub fn rows(&self) -> &[Vec<Value>] {
        &self.rows
    }

    /// Returns the table as `{"columns": [...], "data": [[...], ...]}`: the orientation "split" of pandas, and the form
    /// of MLflow's tables.
    #[must_use]
    pub fn json(&self) -> serde_json::Value {
        let row = |row: &Vec<Value>| row.iter().map(Value::json).collect::<Vec<_>>();
        serde_json::json!({
            "columns": self.columns,
            "data": self.rows.iter().map(row).collect::<Vec<_>>(),
        })
    }

    /// Returns the table as Markdown, which TensorBoard renders as a table.
    #[must_use]
    pub fn markdown(&self) -> String {
        let cell = |text: &str| text.replace('|', "\\|").replace('\n', " ");
        let line = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
        let mut text = line(self.columns.iter().map(|name| cell(name)).collect());
        text += &line(self.columns.iter().map(|_| "---".to_owned()).collect());
        for row in &self.rows {
            text += &line(row.iter().map(|value| cell(&value.text())).collect());
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_as_json_and_as_markdown() {
        let rows = vec![
            vec![Value::from(1), Value::from("a|b")],
            vec![Value::from(f64::NAN), true.into()],
        ];
        let table = Table::new(["n", "what"], rows).unwrap();
        assert_eq!(
            table.json().to_string(),
            r#"{"columns":["n","what"],"data":[[1,"a|b"],["NaN",true]]}"#
        );
        assert_eq!(
            table.markdown(),
            "| n | what |\n| --- | --- |\n| 1 | a\\|b |\n| NaN | true |\n"
        );
        let error = Table::new(["n"], vec![vec![], vec![]]).unwrap_err();
        assert_eq!(error.to_string(), "row 0 of the table has 0 cells, but the table has 1 column");
    }
}
