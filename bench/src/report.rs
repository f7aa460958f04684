//! The page that a person opens: every command's last results, with plots. It is rebuilt from the JSON lines in its folder,
//! and needs nothing from outside.
//!
//! A plot line names a table and has a `style`: `bars` (`x` is the key of a group's name, `series` are `[name, key]`),
//! `lines` (`x` is a number) or `points` (as lines, without them; `label` is the key of a point's text). `log` is for both
//! axes; `curves` are further `[name, [[x, y], ...]]`, and `where` is a `[key, value]` that rows must have.

use crate::results::{Results, save};
use crate::svg::{Series, Titles, bars, lines};
use serde_json::Value;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// Commands in the order of the page, and what each shows.
const SECTIONS: [(&str, &str, &str); 5] = [
    ("savings", "What fusing saves", "Misses and bytes of the rotation in the tile against a rotary pass of its own."),
    (
        "roofline",
        "Against the machine's limits",
        "Peak arithmetic, bandwidth of each level, and where each kernel stands.",
    ),
    ("scaling", "Scaling", "Time against prompt length and threads."),
    ("bench", "Lanes", "Fused, separate and plain C over the model shapes: the table of cargo bench."),
    ("peers", "Other runtimes", "The same calls in other libraries, in turn with ours."),
];

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;color:#222;background:#fafafa;margin:0}\
main{max-width:1100px;margin:0 auto;padding:24px}\
h1{font-size:26px;margin:0 0 4px}h2{font-size:20px;margin:44px 0 4px;border-top:2px solid #ddd;padding-top:20px}\
h3{font-size:15px;margin:26px 0 6px}p{margin:6px 0;max-width:85ch}nav a{margin-right:18px}a{color:#0b6e8f}\
dl{display:grid;grid-template-columns:max-content 1fr;gap:1px 14px;margin:10px 0;font-size:13px;color:#444}dt{font-weight:600}dd{margin:0}\
.w{overflow-x:auto;background:#fff;border:1px solid #e3e3e3;border-radius:4px}\
table{border-collapse:collapse;font-size:13px;width:100%}th,td{padding:4px 10px;text-align:right;border-bottom:1px solid #eee;vertical-align:top}\
th{background:#f3f5f6;white-space:normal;vertical-align:bottom}td{font-variant-numeric:tabular-nums;white-space:nowrap}\
td:first-child,th:first-child,td.s,th.s{text-align:left}td.s{white-space:normal;min-width:24ch}\
figure{margin:14px 0;background:#fff;border:1px solid #e3e3e3;border-radius:4px;padding:8px;max-width:820px}svg{width:100%;height:auto;display:block}\
code{background:#eef1f2;padding:1px 4px;border-radius:3px}";

/// The folder of results: `rotile-report` in cargo's target folder.
pub fn folder() -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(
        || {
            // target/release/rotile-bench, or the workspace's own where the program was moved.
            let exe = std::env::current_exe().ok();
            let beside = exe.as_deref().and_then(|exe| Some(exe.parent()?.parent()?.to_path_buf()));
            let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target");
            beside.filter(|dir| dir.join("CACHEDIR.TAG").exists()).unwrap_or(workspace)
        },
        PathBuf::from,
    );
    target.join("rotile-report")
}

/// Writes the page and its plots from the results in `folder`; returns the page's path.
///
/// # Errors
///
/// A file that can't be read or written, or has been damaged.
pub fn rebuild(folder: &Path) -> Result<PathBuf, String> {
    let mut found = Vec::new();
    for (command, ..) in SECTIONS {
        let path = folder.join(format!("{command}.jsonl"));
        match std::fs::read_to_string(&path) {
            Ok(text) => {
                let damaged = |e| format!("{}: {e}; delete it or run the command again", path.display());
                found.push(Results::parse(&text).map_err(damaged)?);
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(format!("{} can't be read: {error}", path.display())),
        }
    }
    for results in &found {
        for (n, svg) in plots(results).iter().enumerate() {
            let command = results.run()["command"].as_str().unwrap_or("unnamed");
            save(&folder.join(format!("{command}-{}.svg", n + 1)), svg)?;
        }
    }
    let path = folder.join("index.html");
    save(&path, &page(&found))?;
    Ok(path)
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// The page.
pub fn page(found: &[Results]) -> String {
    let mut out = format!(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">\
         <title>Rotile bench</title><style>{STYLE}</style><main>\n<h1>Rotile bench</h1>\n\
         <p>Times are best (median) of repeats. Compare figures within one run only: machines drift.</p>\n<nav>"
    );
    let of = |command: &str| found.iter().find(|results| results.run()["command"] == command);
    for (command, title, _) in SECTIONS {
        match of(command) {
            Some(_) => _ = write!(out, "<a href=\"#{command}\">{title}</a>"),
            None => _ = write!(out, "<span>{title}: not run ({command})</span> "),
        }
    }
    out.push_str("</nav>\n");
    for (command, title, about) in SECTIONS {
        if let Some(results) = of(command) {
            let _ = writeln!(out, "<h2 id=\"{command}\">{title}</h2>\n<p>{about}</p>");
            section(&mut out, results);
        }
    }
    out + "</main></html>\n"
}

fn section(out: &mut String, results: &Results) {
    let heading: String =
        results.heading().iter().map(|(name, value)| format!("<dt>{name}</dt><dd>{}</dd>", escape(value))).collect();
    let _ = writeln!(out, "<dl>{heading}</dl>");
    for note in results.of_kind("note") {
        let _ = writeln!(out, "<p>{}</p>", escape(note["text"].as_str().unwrap_or("?")));
    }
    for svg in plots(results) {
        let _ = writeln!(out, "<figure>{svg}</figure>");
    }
    for table in results.of_kind("table") {
        let (heads, rows) = results.cells(table);
        // A column of sentences may wrap.
        let long = |i: usize| rows.iter().any(|row| row[i].chars().count() > 40);
        let class = |i: usize| if long(i) { " class=\"s\"" } else { "" };
        let _ = writeln!(out, "<h3>{}</h3>", escape(table["title"].as_str().unwrap_or("?")));
        let line = |cells: &[String], tag: &str| -> String {
            let cell = |(i, cell): (usize, &String)| format!("<{tag}{}>{}</{tag}>", class(i), escape(cell));
            format!("<tr>{}</tr>\n", cells.iter().enumerate().map(cell).collect::<String>())
        };
        let body: String = rows.iter().map(|row| line(row, "td")).collect();
        let _ = writeln!(out, "<div class=\"w\"><table>{}{body}</table></div>", line(&heads, "th"));
    }
}

/// The plots of one command.
fn plots(results: &Results) -> Vec<String> {
    results.of_kind("plot").map(|line| plot(results, line["table"].as_str().unwrap_or(""), &line["plot"])).collect()
}

fn plot(results: &Results, table: &str, plot: &Value) -> String {
    let text = |key: &str| plot[key].as_str().unwrap_or("");
    let titles = Titles { title: text("title"), x: text("x_label"), y: text("y_label") };
    let rows: Vec<&Value> = results
        .rows(table)
        .filter(|row| match (&plot["where"][0], &plot["where"][1]) {
            (Value::String(key), value) => &row[key] == value,
            _ => true,
        })
        .collect();
    let style = text("style");
    let number = |row: &Value, key: &str| row[key].as_f64().unwrap_or(f64::NAN);
    let none = Vec::new();
    let mut series: Vec<Series> = plot["series"]
        .as_array()
        .unwrap_or(&none)
        .iter()
        .map(|series| {
            let key = series[1].as_str().unwrap_or("");
            let point = |(i, row): (usize, &&Value)| {
                (if style == "bars" { i as f64 } else { number(row, text("x")) }, number(row, key))
            };
            let label = |row: &&Value| row[text("label")].as_str().unwrap_or("").to_string();
            Series {
                name: series[0].as_str().unwrap_or("").to_string(),
                points: rows.iter().enumerate().map(point).collect(),
                labels: rows.iter().map(label).collect(),
                scattered: style == "points",
            }
        })
        .collect();
    if style == "bars" {
        let groups: Vec<String> = rows.iter().map(|row| row[text("x")].as_str().unwrap_or("?").to_string()).collect();
        return bars(titles, &groups, &series);
    }
    for curve in plot["curves"].as_array().unwrap_or(&none) {
        let pair = |p: &Value| (p[0].as_f64().unwrap_or(f64::NAN), p[1].as_f64().unwrap_or(f64::NAN));
        let points = curve[1].as_array().unwrap_or(&none).iter().map(pair).collect();
        let name = curve[0].as_str().unwrap_or("").to_string();
        series.push(Series { name, points, labels: Vec::new(), scattered: false });
    }
    lines(titles, plot["log"] == true, &series)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn sample(command: &str) -> Results {
        let mut results = Results::new(command, &format!("rotile-bench {command}"), "avx2");
        results.table("t", "Rates <by> shape", &[("shape", &["shape"]), ("GFLOP/s", &["rate"])]);
        results.row("t", json!({"shape": "8/2x128", "rate": 80.25, "tokens": 128}));
        results.row("t", json!({"shape": "4/1x256", "rate": 70, "tokens": 512}));
        let series = json!([["fused", "rate"]]);
        results.plot("t", json!({"style": "bars", "title": "Bars", "x": "shape", "series": series}));
        let curves = json!([["limit", [[100, 90], [600, 90]]]]);
        results.plot(
            "t",
            json!({"style": "lines", "title": "Lines", "x": "tokens", "log": true, "series": series, "curves": curves}),
        );
        results
    }

    #[test]
    fn the_page_is_whole_and_needs_nothing_from_outside() {
        let page = page(&[sample("roofline"), sample("savings")]);
        for want in ["<td>80.25</td>", "Rates &lt;by&gt; shape", "8/2x128", "state of the run", "not run (scaling)"] {
            assert!(page.contains(want), "{want:?} is not in the page");
        }
        assert_eq!((page.matches("<svg").count(), page.matches("<polyline").count()), (4, 4));
        // In the page's order, not in that of the runs.
        assert!(page.find("id=\"savings\"") < page.find("id=\"roofline\""));
        assert!(!page.contains("<script") && !page.contains("src=") && !page.contains("@import"));
    }

    #[test]
    fn it_is_rebuilt_from_the_files_that_are_there() {
        let folder = std::env::temp_dir().join(format!("rotile-report-test-{}", std::process::id()));
        assert!(std::fs::read_to_string(rebuild(&folder).unwrap()).unwrap().contains("not run"));
        sample("scaling").write(&folder).unwrap();
        let page = std::fs::read_to_string(rebuild(&folder).unwrap()).unwrap();
        assert!(page.contains("id=\"scaling\"") && !page.contains("id=\"savings\""));
        assert!(folder.join("scaling-2.svg").exists() && folder.join("scaling.txt").exists());
        std::fs::write(folder.join("savings.jsonl"), "nonsense").unwrap();
        assert!(rebuild(&folder).unwrap_err().contains("savings.jsonl: line 1"));
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
