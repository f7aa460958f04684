//! The command line of `rotile-bench`.

use crate::cases::Case;
use crate::measure::CacheState;
use crate::profiles::Profile;
use lexopt::prelude::*;
use rotile::TierName;

/// What `--help` prints.
pub const HELP: &str = "\
Measures what rotating inside the attention tile saves, and how near the kernels come to the machine's limits.

Usage: cargo run --release -p rotile-bench -- COMMAND [OPTIONS]

Commands:
  savings    Cache misses and bytes of fused and separate rotation, in three views: hardware counters, a
             simulated device's caches (needs valgrind), and the bytes that must move; and time
  roofline   Peak arithmetic, bandwidth of each level of memory, and where each kernel stands
  scaling    Time against 128 to 16K tokens, and against threads
  peers      The same calls in candle (feature peers), PyTorch, ONNX Runtime and OpenVINO, where installed
  all        savings, roofline and scaling
  report     Rebuilds the page from the results that are there
  counts     Instructions and D1 misses of fixed calls, one per line, for ci/counts (needs valgrind)

Options:
  --quick         Fewer shapes, profiles and repeats: all in under a minute
  --profile NAME  A device for savings, may be repeated: cortex-a53, cortex-a76, raspberry-pi-5, skylake, zen3,
                  host, or all [default: raspberry-pi-5, skylake and host; raspberry-pi-5 with --quick]
  --tier NAME     The tier to run: portable, avx2, avx512 or neon [default: the best here, or the pinned feature's]
  -h, --help      Prints this

Results go to target/rotile-report: JSON lines, plain tables, SVG plots, and index.html to open.
";

/// What to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Command {
    /// Print the help.
    Help,
    /// Misses and bytes.
    Savings,
    /// Limits.
    Roofline,
    /// Sizes and threads.
    Scaling,
    /// Other runtimes.
    Peers,
    /// The three before that need nothing else.
    All,
    /// Only the page.
    Report,
    /// Counts for the regression guard.
    Counts,
    /// The inner side of a run under valgrind; not in the help.
    Probe(Probe),
}

/// One lane to run under valgrind.
#[derive(Clone, Debug, PartialEq)]
pub struct Probe {
    /// What to run.
    pub case: Case,
    /// Caches at its start.
    pub state: CacheState,
    /// For the plan.
    pub l1_bytes: usize,
    /// For the plan.
    pub l2_bytes: usize,
}

/// A command and its options.
#[derive(Clone, Debug, PartialEq)]
pub struct Args {
    /// The command.
    pub command: Command,
    /// A first look.
    pub quick: bool,
    /// Devices to simulate; empty: the default ones.
    pub profiles: Vec<Profile>,
    /// The tier to pin.
    pub tier: Option<TierName>,
    /// As typed, for the report.
    pub line: String,
}

impl Args {
    /// Reads arguments, the program's name not among them.
    ///
    /// # Errors
    ///
    /// The argument that can't be understood, and what could.
    pub fn parse<S: Into<std::ffi::OsString>>(arguments: impl IntoIterator<Item = S>) -> Result<Args, String> {
        let arguments: Vec<std::ffi::OsString> = arguments.into_iter().map(Into::into).collect();
        let typed: Vec<String> = arguments.iter().map(|a| a.to_string_lossy().into_owned()).collect();
        let mut args = Args {
            command: Command::Help,
            quick: false,
            profiles: Vec::new(),
            tier: None,
            line: format!("rotile-bench {}", typed.join(" ")),
        };
        let mut words: Vec<String> = Vec::new();
        let (mut state, mut l1_bytes, mut l2_bytes) = (CacheState::Cold, 0, 0);
        let mut parser = lexopt::Parser::from_args(arguments);
        while let Some(argument) = parser.next().map_err(explain)? {
            match argument {
                Short('h') | Long("help") => return Ok(Args { command: Command::Help, ..args }),
                Long("quick") => args.quick = true,
                Long("profile") => match &value(&mut parser)?[..] {
                    "all" => {
                        args.profiles.extend(crate::profiles::DEVICES);
                        args.profiles.extend(Profile::named("host"));
                    }
                    name => args.profiles.push(Profile::named(name)?),
                },
                Long("tier") => {
                    let name = value(&mut parser)?;
                    let tier = TierName::from_name(&name);
                    args.tier =
                        Some(tier.ok_or_else(|| {
                            format!("there is no tier {name:?}: give portable, avx2, avx512 or neon")
                        })?);
                }
                Long("state") => {
                    let name = value(&mut parser)?;
                    let all = [CacheState::Warm, CacheState::Cold];
                    let known = all.into_iter().find(|state| state.name() == name);
                    state = known.ok_or_else(|| format!("there is no cache state {name:?}: give warm or cold"))?;
                }
                Long("l1") => l1_bytes = bytes(&value(&mut parser)?)?,
                Long("l2") => l2_bytes = bytes(&value(&mut parser)?)?,
                Value(word) => words.push(word.to_string_lossy().into_owned()),
                other => return Err(explain(other.unexpected())),
            }
        }
        let words: Vec<&str> = words.iter().map(|word| &word[..]).collect();
        args.command = match words[..] {
            [] => return Err("a command is missing: --help lists them".into()),
            ["savings"] => Command::Savings,
            ["roofline"] => Command::Roofline,
            ["scaling"] => Command::Scaling,
            ["peers"] => Command::Peers,
            ["all"] => Command::All,
            ["report"] => Command::Report,
            ["counts"] => Command::Counts,
            ["help"] => Command::Help,
            ["probe", case] => Command::Probe(Probe { case: case.parse()?, state, l1_bytes, l2_bytes }),
            [command] => return Err(format!("there is no command {command:?}: --help lists them")),
            [_, more, ..] => return Err(format!("{more:?} is one word too many: give one command")),
        };
        Ok(args)
    }
}

fn explain(error: lexopt::Error) -> String {
    format!("{error}; --help lists commands and options")
}

fn value(parser: &mut lexopt::Parser) -> Result<String, String> {
    parser.value().map_err(explain).map(|value| value.to_string_lossy().into_owned())
}

fn bytes(text: &str) -> Result<usize, String> {
    text.parse().map_err(|e| format!("{text:?} is no number of bytes: {e}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Args, String> {
        Args::parse(line.split_whitespace())
    }

    #[test]
    fn commands_and_options() {
        let args = parse("savings --quick --profile zen3 --profile=cortex-a53 --tier avx2").unwrap();
        assert_eq!((args.command, args.quick, args.tier), (Command::Savings, true, Some(TierName::Avx2)));
        assert_eq!(args.profiles.iter().map(|p| p.name).collect::<Vec<_>>(), ["zen3", "cortex-a53"]);
        assert_eq!(args.line, "rotile-bench savings --quick --profile zen3 --profile=cortex-a53 --tier avx2");
        assert_eq!(parse("--help").unwrap().command, Command::Help);
        assert_eq!(parse("all -h").unwrap().command, Command::Help);
        assert!(parse("savings --profile all").unwrap().profiles.len() >= 5);
        let probe = parse("probe decode:32/8x128:512:f16:fused --state warm --l1 32768 --l2 65536").unwrap();
        let Command::Probe(probe) = probe.command else { panic!("{probe:?}") };
        assert_eq!((probe.state, probe.l1_bytes, probe.l2_bytes), (CacheState::Warm, 32768, 65536));
        assert_eq!(probe.case.to_string(), "decode:32/8x128:512:f16:fused");
    }

    #[test]
    fn mistakes_are_named() {
        for (line, want) in [
            ("", "command is missing"),
            ("fly", "\"fly\""),
            ("savings roofline", "\"roofline\" is one word too many"),
            ("savings --profile m0", "\"m0\""),
            ("savings --profile", "--profile"),
            ("savings --tier sse", "\"sse\""),
            ("savings --fast", "--fast"),
            ("probe prefill", "case \"prefill\""),
            ("probe prefill:1/1x64:1:f32:fused --state hot", "\"hot\""),
            ("probe prefill:1/1x64:1:f32:fused --l1 x", "\"x\""),
        ] {
            let error = parse(line).unwrap_err();
            assert!(error.contains(want), "{line}: {error}");
        }
    }
}
