//! What this machine is: caches, name, date.

use std::fs::read_to_string;
use std::time::{SystemTime, UNIX_EPOCH};

/// A cache that holds data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cache {
    /// 1 is next to the core.
    pub level: usize,
    /// Bytes.
    pub bytes: usize,
    /// Ways of a set.
    pub ways: usize,
    /// Bytes of a line.
    pub line: usize,
}

/// The data caches of the first core from inner to outer, as the system describes them; empty where it does not.
pub fn caches() -> Vec<Cache> {
    let read = |index: usize, file: &str| {
        read_to_string(format!("/sys/devices/system/cpu/cpu0/cache/index{index}/{file}")).ok()
    };
    let number = |index: usize, file: &str| read(index, file)?.trim().parse::<usize>().ok();
    let mut found: Vec<Cache> = (0..8)
        .filter_map(|index| {
            if read(index, "type")?.trim() == "Instruction" {
                return None;
            }
            let kib: usize = read(index, "size")?.trim().strip_suffix('K')?.parse().ok()?;
            Some(Cache {
                level: number(index, "level")?,
                bytes: kib << 10,
                ways: number(index, "ways_of_associativity")?,
                line: number(index, "coherency_line_size")?,
            })
        })
        .collect();
    found.sort_by_key(|cache| cache.level);
    found
}

/// Bytes of the outermost cache; 32 MiB where the system does not say.
pub fn last_level_bytes() -> usize {
    caches().last().map_or(32 << 20, |cache| cache.bytes)
}

/// Processor, number of threads, system.
pub fn name() -> String {
    let info = read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        let line = info.lines().find(|line| line.split(':').next().is_some_and(|key| key.trim() == name))?;
        Some(line.split_once(':')?.1.trim().to_string())
    };
    // Virtual machines shorten the name; family and model tell the generation.
    let numbers = match (field("cpu family"), field("model")) {
        (Some(family), Some(model)) => format!(" (family {family}, model {model})"),
        _ => String::new(),
    };
    let name = field("model name").or_else(|| field("CPU part")).unwrap_or_else(|| "unnamed processor".into());
    let os = std::env::consts::OS;
    format!("{name}{numbers}, {} threads, {}, {os}", threads(), std::env::consts::ARCH)
}

/// Threads that this machine runs at once.
pub fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Date and time, UTC.
pub fn now() -> String {
    date(SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()))
}

fn date(seconds: u64) -> String {
    let (mut days, time) = (seconds / 86_400, seconds % 86_400);
    let leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let mut year = 1970;
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let lengths = [31, 28 + u64::from(leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 0;
    while days >= lengths[month] {
        days -= lengths[month];
        month += 1;
    }
    format!("{year}-{:02}-{:02} {:02}:{:02} UTC", month + 1, days + 1, time / 3600, time / 60 % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates() {
        assert_eq!(date(0), "1970-01-01 00:00 UTC");
        assert_eq!(date(951_782_400), "2000-02-29 00:00 UTC");
        assert_eq!(date(1_798_761_599), "2026-12-31 23:59 UTC");
    }

    #[test]
    fn caches_go_outward() {
        let caches = caches();
        assert!(
            caches.windows(2).all(|pair| pair[0].level < pair[1].level && pair[0].bytes < pair[1].bytes),
            "{caches:?}"
        );
    }
}
