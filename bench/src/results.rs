//! What a command found, as JSON lines: a `run`, then `table`, `row`, `plot` and `note` lines. The plain table and the
//! report page are made from those lines alone, so results of earlier runs stay in the page.

use crate::machine;
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::path::Path;

/// The lines of one command's run.
#[derive(Clone, Debug, PartialEq)]
pub struct Results {
    lines: Vec<Value>,
}

/// A column of a table: its heading, and the keys of a row that it shows. A second key is shown in brackets.
pub type Column<'a> = (&'a str, &'a [&'a str]);

impl Results {
    /// Results of `command`, given on the command line as `line`, on `tier`.
    pub fn new(command: &str, line: &str, tier: &str) -> Results {
        let run = json!({
            "kind": "run", "command": command, "line": line, "tier": tier,
            "machine": machine::name(), "date": machine::now(), "state": "not timed", "state_ratio": null,
        });
        Results { lines: vec![run] }
    }

    /// Starts a table; rows may follow at any time.
    pub fn table(&mut self, id: &str, title: &str, columns: &[Column<'_>]) {
        let columns: Vec<Value> = columns.iter().map(|(label, keys)| json!({"label": label, "keys": keys})).collect();
        self.lines.push(json!({"kind": "table", "id": id, "title": title, "columns": columns}));
    }

    /// Adds a row, an object, to the table of that id.
    pub fn row(&mut self, table: &str, values: Value) {
        self.lines.push(json!({"kind": "row", "table": table, "values": values}));
    }

    /// Adds a sentence.
    pub fn note(&mut self, text: &str) {
        self.lines.push(json!({"kind": "note", "text": text}));
    }

    /// Adds a plot of a table's rows: see [`crate::report`] for its fields.
    pub fn plot(&mut self, table: &str, plot: Value) {
        self.lines.push(json!({"kind": "plot", "table": table, "plot": plot}));
    }

    /// Notes how quiet the machine was.
    pub fn state(&mut self, (ratio, name): (f64, &str)) {
        self.lines[0]["state"] = json!(name);
        self.lines[0]["state_ratio"] = json!(ratio);
    }

    /// The lines of that kind.
    pub fn of_kind<'a>(&'a self, kind: &'a str) -> impl Iterator<Item = &'a Value> + 'a {
        self.lines.iter().filter(move |line| line["kind"] == kind)
    }

    /// The values of a table's rows.
    pub fn rows<'a>(&'a self, table: &'a str) -> impl Iterator<Item = &'a Value> + 'a {
        self.of_kind("row").filter(move |row| row["table"] == table).map(|row| &row["values"])
    }

    /// The line about the run.
    pub fn run(&self) -> &Value {
        &self.lines[0]
    }

    /// Machine, tier, date, command and state, as (name, value).
    pub fn heading(&self) -> [(&'static str, String); 5] {
        let text = |key: &str| self.run()[key].as_str().unwrap_or("?").to_string();
        let state = match self.run()["state_ratio"].as_f64() {
            Some(ratio) => {
                format!("{}: median/best {ratio:.3} of a loop that reads L2, sampled throughout", text("state"))
            }
            None => text("state"),
        };
        [
            ("machine", text("machine")),
            ("tier", text("tier")),
            ("date", text("date")),
            ("command", text("line")),
            ("state of the run", state),
        ]
    }

    /// Headings and cells of a table.
    pub fn cells(&self, table: &Value) -> (Vec<String>, Vec<Vec<String>>) {
        let none = Vec::new();
        let columns = table["columns"].as_array().unwrap_or(&none);
        let cell = |row: &Value, column: &Value| {
            let keys = column["keys"].as_array().unwrap_or(&none);
            let shown: Vec<String> = keys.iter().map(|key| show(&row[key.as_str().unwrap_or("")])).collect();
            match &shown[..] {
                [one, others @ ..] if !others.is_empty() && one != "-" => format!("{one} ({})", others.join(", ")),
                [one, ..] => one.clone(),
                [] => String::new(),
            }
        };
        let heads = columns.iter().map(|column| column["label"].as_str().unwrap_or("?").to_string()).collect();
        let rows = self.rows(table["id"].as_str().unwrap_or(""));
        (heads, rows.map(|row| columns.iter().map(|column| cell(row, column)).collect()).collect())
    }

    /// Everything as plain text.
    pub fn text(&self) -> String {
        let mut out = String::new();
        for (name, value) in self.heading() {
            let _ = writeln!(out, "{name:<16}  {value}");
        }
        for table in self.of_kind("table") {
            let _ = writeln!(out, "\n{}\n", table["title"].as_str().unwrap_or("?"));
            let (heads, rows) = self.cells(table);
            let all: Vec<&Vec<String>> = std::iter::once(&heads).chain(&rows).collect();
            let width = |i: usize| all.iter().map(|row| row[i].chars().count()).max().unwrap_or(0);
            let widths: Vec<usize> = (0..heads.len()).map(width).collect();
            for row in all {
                let line: Vec<String> = row
                    .iter()
                    .zip(&widths)
                    .enumerate()
                    // Text to the left: the first column, and the last, which may be a sentence.
                    .map(
                        |(i, (cell, &w))| {
                            if i == 0 || i + 1 == row.len() { format!("{cell:<w$}") } else { format!("{cell:>w$}") }
                        },
                    )
                    .collect();
                let _ = writeln!(out, "{}", line.join("  ").trim_end());
            }
        }
        for note in self.of_kind("note") {
            let _ = writeln!(out, "\n{}", note["text"].as_str().unwrap_or("?"));
        }
        out
    }

    /// Writes `COMMAND.jsonl` and `COMMAND.txt` into `folder`.
    ///
    /// # Errors
    ///
    /// The path that could not be written, and why.
    pub fn write(&self, folder: &Path) -> Result<(), String> {
        let command = self.run()["command"].as_str().unwrap_or("unnamed");
        let lines: String = self.lines.iter().map(|line| format!("{line}\n")).collect();
        save(&folder.join(format!("{command}.jsonl")), &lines)?;
        save(&folder.join(format!("{command}.txt")), &self.text())
    }

    /// Reads what [`Results::write`] wrote.
    ///
    /// # Errors
    ///
    /// The line that is no JSON, or that there is no run.
    pub fn parse(text: &str) -> Result<Results, String> {
        let parse = |(n, line)| serde_json::from_str(line).map_err(|e| format!("line {}: {e}", n + 1));
        let lines: Vec<Value> = text.lines().enumerate().map(parse).collect::<Result<_, String>>()?;
        match lines.first() {
            Some(first) if first["kind"] == "run" => Ok(Results { lines }),
            _ => Err("the first line describes no run".into()),
        }
    }
}

/// Writes a file.
///
/// # Errors
///
/// The path, and why not.
pub fn save(path: &Path, text: &str) -> Result<(), String> {
    let folder = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)
        .and_then(|()| std::fs::write(path, text))
        .map_err(|e| format!("{} can't be written: {e}", path.display()))
}

/// A value as a cell shows it.
pub fn show(value: &Value) -> String {
    match value {
        Value::Null => "-".into(),
        Value::Number(n) => n.as_f64().map_or("-".into(), number),
        Value::String(s) => s.clone(),
        other => other.to_string(),
    }
}

/// Three to four digits that matter; whole numbers in groups of three.
pub fn number(x: f64) -> String {
    if x.fract() == 0.0 && x.abs() < 1e15 {
        let digits = format!("{:.0}", x.abs());
        let mut out = String::from(if x < 0.0 { "-" } else { "" });
        for (i, c) in digits.chars().enumerate() {
            if i > 0 && (digits.len() - i).is_multiple_of(3) {
                out.push(',');
            }
            out.push(c);
        }
        return out;
    }
    let digits = match x.abs() {
        a if a >= 1000.0 => return number(x.round()),
        a if a >= 100.0 => 1,
        a if a >= 10.0 => 2,
        a if a >= 0.1 => 3,
        a if a >= 0.001 => 5,
        _ => return format!("{x:.2e}"),
    };
    format!("{x:.digits$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Results {
        let mut results = Results::new("savings", "rotile-bench savings", "avx2");
        results.table("t", "A table", &[("shape", &["shape"]), ("ms", &["best", "median"]), ("why", &["why"])]);
        results.row("t", json!({"shape": "a", "best": 1.5, "median": 2.0, "why": "so"}));
        results.row("t", json!({"shape": "bcd", "best": null}));
        results.note("A note.");
        results.state((1.02, "quiet"));
        results
    }

    #[test]
    fn lines_read_back() {
        let results = sample();
        let text: String = results.lines.iter().map(|line| format!("{line}\n")).collect();
        assert_eq!(Results::parse(&text).unwrap(), results);
        assert!(Results::parse("{}\n").unwrap_err().contains("no run"));
        assert!(Results::parse("{\"kind\":\"run\"}\n{").unwrap_err().starts_with("line 2"));
    }

    #[test]
    fn text_has_head_table_and_notes() {
        let text = sample().text();
        for want in [
            "tier              avx2",
            "quiet: median/best 1.020",
            "shape         ms  why",
            "a      1.500 (2)  so",
            "bcd            -  -",
            "A note.",
        ] {
            assert!(text.contains(want), "{want:?} is not in\n{text}");
        }
    }

    #[test]
    fn numbers() {
        for (x, want) in [
            (0.0, "0"),
            (-1234567.0, "-1,234,567"),
            (12345.6, "12,346"),
            (123.456, "123.5"),
            (0.5, "0.500"),
            (0.0123, "0.01230"),
            (1e-7, "1.00e-7"),
        ] {
            assert_eq!(number(x), want);
        }
    }
}
