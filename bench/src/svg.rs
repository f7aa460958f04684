//! Small plots: grouped bars, and lines or points on linear or logarithmic axes. Written by hand, as a plotting library
//! would be larger than all of this crate.

use crate::results::number;
use std::fmt::Write as _;

/// Colours of series, distinct in print and to colour-blind eyes.
const COLOURS: [&str; 6] = ["#0b6e8f", "#d1602b", "#6b7a2a", "#7a4b9a", "#b0902a", "#555555"];
const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 360.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 56.0;
const BOTTOM: f64 = 52.0;

/// Values under one name.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Series {
    /// Its name in the legend.
    pub(crate) name: String,
    /// Points; for bars, x is the number of the group.
    pub(crate) points: Vec<(f64, f64)>,
    /// A text at each point; may be empty.
    pub(crate) labels: Vec<String>,
    /// Points alone, without the line between them.
    pub(crate) scattered: bool,
}

/// Titles of a plot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Titles<'a> {
    /// Above it.
    pub(crate) title: &'a str,
    /// Under the x axis.
    pub(crate) x: &'a str,
    /// Beside the y axis.
    pub(crate) y: &'a str,
}

struct Axis {
    from: f64,
    to: f64,
    log: bool,
}

impl Axis {
    /// Covers `values`; from 0 if linear.
    fn over(values: impl Iterator<Item = f64>, log: bool) -> Axis {
        let (mut from, mut to) = (f64::INFINITY, f64::NEG_INFINITY);
        for x in values.filter(|x| x.is_finite() && (!log || *x > 0.0)) {
            (from, to) = (from.min(x), to.max(x));
        }
        if from > to {
            (from, to) = (1.0, 2.0);
        }
        match log {
            true => Axis { from: from / 1.2, to: to * 1.2, log },
            false => Axis { from: from.min(0.0) * 1.08, to: (to * 1.08).max(f64::MIN_POSITIVE), log },
        }
    }

    /// 0 to 1.
    fn at(&self, x: f64) -> f64 {
        match self.log {
            true => (x / self.from).ln() / (self.to / self.from).ln(),
            false => (x - self.from) / (self.to - self.from),
        }
    }

    fn ticks(&self) -> Vec<f64> {
        if self.log {
            let decade = self.from.log10().floor() as i32..=self.to.log10().ceil() as i32;
            let few = self.to / self.from < 300.0;
            let steps: &[f64] = if few { &[1.0, 2.0, 5.0] } else { &[1.0] };
            let all = decade.flat_map(|d| steps.iter().map(move |s| s * 10f64.powi(d)));
            return all.filter(|x| (self.from..=self.to).contains(x)).collect();
        }
        let raw = (self.to - self.from) / 5.0;
        let unit = 10f64.powf(raw.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|s| s * unit).into_iter().find(|s| *s >= raw).unwrap_or(raw);
        let first = (self.from / step).ceil() as i64;
        (first..).map(|n| n as f64 * step).take_while(|x| *x <= self.to).collect()
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

fn text(out: &mut String, x: f64, y: f64, anchor: &str, class: &str, content: &str) {
    let content = escape(content);
    let _ = writeln!(out, r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}" class="{class}">{content}</text>"#);
}

fn start(titles: Titles<'_>, names: &[&str]) -> String {
    let mut out = format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{}">
<style>text{{font:12px system-ui,sans-serif;fill:#222}}.t{{font-size:14px;font-weight:600}}.s{{font-size:10.5px;fill:#444}}.g{{stroke:#e3e3e3}}.a{{stroke:#777}}</style>
<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>
"##,
        escape(titles.title)
    );
    text(&mut out, LEFT, 18.0, "start", "t", titles.title);
    let mut x = LEFT;
    for (i, name) in names.iter().enumerate() {
        let colour = COLOURS[i % COLOURS.len()];
        let _ = writeln!(out, r#"<rect x="{x:.1}" y="29" width="11" height="11" fill="{colour}"/>"#);
        text(&mut out, x + 16.0, 39.0, "start", "", name);
        x += 34.0 + 6.6 * name.chars().count() as f64;
    }
    text(&mut out, (LEFT + WIDTH - RIGHT) / 2.0, HEIGHT - 8.0, "middle", "", titles.x);
    let middle = (TOP + HEIGHT - BOTTOM) / 2.0;
    let y = escape(titles.y);
    let _ = writeln!(out, r#"<text transform="translate(16 {middle:.1}) rotate(-90)" text-anchor="middle">{y}</text>"#);
    out
}

fn y_grid(out: &mut String, axis: &Axis) {
    for tick in axis.ticks() {
        let y = y_of(axis, tick);
        let class = if tick == 0.0 { "a" } else { "g" };
        let _ =
            writeln!(out, r#"<line x1="{LEFT}" x2="{:.1}" y1="{y:.1}" y2="{y:.1}" class="{class}"/>"#, WIDTH - RIGHT);
        text(out, LEFT - 6.0, y + 4.0, "end", "s", &short(tick));
    }
}

fn y_of(axis: &Axis, y: f64) -> f64 {
    HEIGHT - BOTTOM - axis.at(y) * (HEIGHT - BOTTOM - TOP)
}

/// A tick: without the zeros that a cell keeps.
fn short(x: f64) -> String {
    let text = number(x);
    match text.contains('.') && !text.contains('e') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_string(),
        false => text,
    }
}

/// One group of bars for each of `groups`, one bar of each series in it.
pub(crate) fn bars(titles: Titles<'_>, groups: &[String], series: &[Series]) -> String {
    let names: Vec<&str> = series.iter().map(|s| &s.name[..]).collect();
    let mut out = start(titles, &names);
    let axis = Axis::over(series.iter().flat_map(|s| s.points.iter().map(|p| p.1)), false);
    y_grid(&mut out, &axis);
    let group_width = (WIDTH - LEFT - RIGHT) / groups.len().max(1) as f64;
    let width = (group_width * 0.76 / series.len().max(1) as f64).min(60.0);
    for (i, s) in series.iter().enumerate() {
        for &(group, value) in s.points.iter().filter(|p| p.1.is_finite()) {
            let middle = LEFT + (group + 0.5) * group_width;
            let x = middle + (i as f64 - series.len() as f64 / 2.0) * width;
            let (top, bottom) = (y_of(&axis, value.max(0.0)), y_of(&axis, value.min(0.0)));
            let (height, colour) = ((bottom - top).max(0.5), COLOURS[i % COLOURS.len()]);
            let hint = escape(&format!("{}: {}", s.name, number(value)));
            let _ = writeln!(
                out,
                r#"<rect x="{x:.1}" y="{top:.1}" width="{:.1}" height="{height:.1}" fill="{colour}"><title>{hint}</title></rect>"#,
                width - 1.0
            );
        }
    }
    // Long names take two lines, broken at a space.
    for (i, group) in groups.iter().enumerate() {
        let x = LEFT + (i as f64 + 0.5) * group_width;
        let fits = (group_width / 5.6) as usize;
        let split = match group.char_indices().rfind(|(at, c)| *c == ' ' && *at <= fits) {
            Some((at, _)) if group.chars().count() > fits => at,
            _ => group.len(),
        };
        text(&mut out, x, HEIGHT - BOTTOM + 15.0, "middle", "s", &group[..split]);
        text(&mut out, x, HEIGHT - BOTTOM + 28.0, "middle", "s", group[split..].trim_start());
    }
    out + "</svg>\n"
}

/// Lines, or points, over x.
pub(crate) fn lines(titles: Titles<'_>, log: bool, series: &[Series]) -> String {
    // Scattered points share the first legend entry of their name.
    let names: Vec<&str> = series.iter().map(|s| &s.name[..]).collect();
    let mut out = start(titles, &names);
    let all = || series.iter().flat_map(|s| &s.points);
    let (x_axis, y_axis) = (Axis::over(all().map(|p| p.0), log), Axis::over(all().map(|p| p.1), log));
    y_grid(&mut out, &y_axis);
    let x_of = |x: f64| LEFT + x_axis.at(x) * (WIDTH - LEFT - RIGHT);
    for tick in x_axis.ticks() {
        let x = x_of(tick);
        let _ = writeln!(out, r#"<line x1="{x:.1}" x2="{x:.1}" y1="{TOP}" y2="{:.1}" class="g"/>"#, HEIGHT - BOTTOM);
        text(&mut out, x, HEIGHT - BOTTOM + 16.0, "middle", "s", &short(tick));
    }
    let mut taken: Vec<(f64, f64)> = Vec::new();
    for (i, s) in series.iter().enumerate() {
        let colour = COLOURS[i % COLOURS.len()];
        let shown: Vec<(f64, f64)> = s.points.iter().map(|p| (x_of(p.0), y_of(&y_axis, p.1))).collect();
        if !s.scattered {
            let path: Vec<String> = shown.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
            let path = path.join(" ");
            let _ = writeln!(out, r#"<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>"#);
        }
        for (n, (x, y)) in shown.into_iter().enumerate().filter(|(_, p)| p.1.is_finite()) {
            let label = s.labels.get(n).map_or("", |label| label);
            let (px, py) = s.points[n];
            let hint = escape(&format!("{} {label}: {}, {}", s.name, number(px), number(py)));
            let _ = writeln!(
                out,
                r#"<circle cx="{x:.1}" cy="{y:.1}" r="3.5" fill="{colour}"><title>{hint}</title></circle>"#
            );
            if !label.is_empty() {
                // Labels that would lie on one another move down.
                let left = x > WIDTH * 0.72;
                let mut at = y - 5.0;
                while taken.iter().any(|(tx, ty)| (tx - x).abs() < 130.0 && (ty - at).abs() < 11.0) {
                    at += 11.0;
                }
                taken.push((x, at));
                let (x, anchor) = if left { (x - 6.0, "end") } else { (x + 6.0, "start") };
                text(&mut out, x, at, anchor, "s", label);
            }
        }
    }
    out + "</svg>\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plots_hold_what_they_are_given() {
        let series = [
            Series { name: "a<b".into(), points: vec![(0.0, 5.0), (1.0, -2.0)], labels: vec![], scattered: false },
            Series { name: "c".into(), points: vec![(0.0, 1.0), (1.0, f64::NAN)], labels: vec![], scattered: false },
        ];
        let titles = Titles { title: "T", x: "x", y: "y" };
        let svg = bars(titles, &["one".into(), "two words".into()], &series);
        assert_eq!(svg.matches("<title>").count(), 3);
        assert!(svg.contains("a&lt;b: 5") && svg.contains("two words") && svg.ends_with("</svg>\n"), "{svg}");
        let svg = lines(titles, false, &series[..1]);
        assert_eq!((svg.matches("<circle").count(), svg.matches("<polyline").count()), (2, 1));
    }

    #[test]
    fn ticks_are_round() {
        assert_eq!(Axis { from: 0.0, to: 10.0, log: false }.ticks(), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        assert_eq!(Axis { from: 0.9, to: 60.0, log: true }.ticks(), [1.0, 2.0, 5.0, 10.0, 20.0, 50.0]);
        assert_eq!(Axis { from: 1.0, to: 1e6, log: true }.ticks().len(), 7);
    }
}
