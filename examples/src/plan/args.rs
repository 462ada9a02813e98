//! Flags, and the packs that they name.

use std::{fs, path::PathBuf};

use burn_cp::{
    layout::{LayoutPolicy, Visibility},
    plan::{CostShape, ExchangeStrategy, Hardware, MaskKind},
};
use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};

use super::PlanCommandError;

/// How tokens are dealt out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum LayoutArg {
    /// Equal consecutive parts
    Contiguous,
    /// A part from the front and one from the back
    HeadTail,
    /// Head and tail of every document, padded until its chunks are equal
    DualChunkSwap,
    /// Even work, few keys and values received
    Balanced,
}

impl LayoutArg {
    /// The policy, for a mask.
    #[must_use]
    pub fn policy(self, mask: MaskKind) -> LayoutPolicy {
        match self {
            Self::Contiguous => LayoutPolicy::Contiguous { multiple: 1 },
            Self::HeadTail => LayoutPolicy::HeadTail,
            Self::DualChunkSwap => LayoutPolicy::DualChunkSwap,
            Self::Balanced => LayoutPolicy::Balanced {
                visibility: Visibility::from(mask),
            },
        }
    }

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Contiguous => "contiguous",
            Self::HeadTail => "head-tail",
            Self::DualChunkSwap => "dual-chunk-swap",
            Self::Balanced => "balanced",
        }
    }
}

/// How keys and values travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum ExchangeArg {
    /// Every rank gets every shard
    AllGather,
    /// Every rank gets what its tokens see
    NeededOnly,
    /// The same, where all of it is the left neighbour's
    LeftHalo,
    /// Shards pass round
    Ring,
    /// Sequence shards are traded for head shards
    HeadAllToAll,
    /// What is predicted to be fastest
    Auto,
}

impl ExchangeArg {
    /// The strategy.
    #[must_use]
    pub fn strategy(self) -> ExchangeStrategy {
        match self {
            Self::AllGather => ExchangeStrategy::AllGather,
            Self::NeededOnly => ExchangeStrategy::NeededOnly,
            Self::LeftHalo => ExchangeStrategy::LeftHalo,
            Self::Ring => ExchangeStrategy::Ring,
            Self::HeadAllToAll => ExchangeStrategy::HeadAllToAll,
            Self::Auto => ExchangeStrategy::Auto,
        }
    }

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::AllGather => "all-gather",
            Self::NeededOnly => "needed-only",
            Self::LeftHalo => "left-halo",
            Self::Ring => "ring",
            Self::HeadAllToAll => "head-all-to-all",
            Self::Auto => "auto",
        }
    }
}

/// Elements of queries, keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DtypeArg {
    /// 2 bytes
    Bf16,
    /// 2 bytes
    F16,
    /// 4 bytes
    F32,
    /// 8 bytes
    F64,
}

/// Which tokens of a document see each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum MaskArg {
    /// The token itself and earlier ones
    Causal,
    /// All
    Full,
}

/// What is planned, for which model and hardware.
#[derive(Debug, Clone, Args)]
pub struct PlanArgs {
    /// Lengths of the documents of one pack, in order
    #[arg(
        long,
        value_delimiter = ',',
        required_unless_present = "jsonl",
        conflicts_with = "jsonl"
    )]
    pub lengths: Vec<usize>,
    /// File with a pack on each line: [100, 80, 44] or {"lengths": [100, 80, 44]}; figures are sums over the packs
    #[arg(long, value_name = "FILE")]
    pub jsonl: Option<PathBuf>,
    /// Layouts to compare [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    pub layout: Vec<LayoutArg>,
    /// Exchanges to compare [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    pub exchange: Vec<ExchangeArg>,
    /// Query heads
    #[arg(long, default_value_t = 16)]
    pub heads: usize,
    /// Key and value heads
    #[arg(long, default_value_t = 8)]
    pub kv_heads: usize,
    /// Elements of a head
    #[arg(long, default_value_t = 128)]
    pub head_dim: usize,
    /// Elements of a head of values [default: those of --head-dim]
    #[arg(long)]
    pub v_head_dim: Option<usize>,
    /// Elements on the wire
    #[arg(long, value_enum, default_value_t = DtypeArg::Bf16)]
    pub dtype: DtypeArg,
    /// Gigabytes per second that a rank sends, and receives at the same time
    #[arg(long, default_value_t = 280.0)]
    pub link_gbs: f64,
    /// Gigabytes per second at which a rank copies rows that travel
    #[arg(long, default_value_t = 600.0)]
    pub copy_gbs: f64,
    /// 10^12 floating-point operations per second that attention reaches on a rank
    #[arg(long, default_value_t = 500.0)]
    pub tflops: f64,
    /// Microseconds of a message besides its bytes
    #[arg(long, default_value_t = 10.0)]
    pub latency_us: f64,
    /// Ranks do not compute while their messages travel
    #[arg(long)]
    pub no_overlap: bool,
    /// Which tokens of a document see each other
    #[arg(long, value_enum, default_value_t = MaskArg::Causal)]
    pub mask: MaskArg,
    /// Earlier tokens that a token sees besides itself, under a causal mask [default: all]
    #[arg(long)]
    pub window: Option<usize>,
    /// Print an array with an object per layout and exchange
    #[arg(long)]
    pub json: bool,
    /// Draw ranks, tokens, documents and what moves between them, of the first pack
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Line {
    Lengths(Vec<usize>),
    Named { lengths: Vec<usize> },
}

impl PlanArgs {
    /// Checks what the parser cannot.
    ///
    /// # Errors
    /// The first flag that is out of range.
    pub fn validate(&self) -> Result<(), PlanCommandError> {
        let flag = |flag, expected, got: &dyn ToString| {
            Err(PlanCommandError::Flag {
                flag,
                expected,
                got: got.to_string(),
            })
        };
        let counts = [
            ("heads", self.heads),
            ("kv-heads", self.kv_heads),
            ("head-dim", self.head_dim),
            ("v-head-dim", self.v_head_dim.unwrap_or(1)),
        ];
        for (name, count) in counts {
            if count == 0 || count > 1 << 20 {
                return flag(name, "a number from 1 to 1048576", &count);
            }
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return flag("kv-heads", "a divisor of --heads", &self.kv_heads);
        }
        for (name, value) in [
            ("link-gbs", self.link_gbs),
            ("copy-gbs", self.copy_gbs),
            ("tflops", self.tflops),
        ] {
            if !value.is_finite() || value <= 0.0 {
                return flag(name, "a number above 0", &value);
            }
        }
        if !self.latency_us.is_finite() || self.latency_us < 0.0 {
            return flag("latency-us", "a number of at least 0", &self.latency_us);
        }
        if let (MaskArg::Full, Some(window)) = (self.mask, self.window) {
            return flag("window", "none with --mask full", &window);
        }
        Ok(())
    }

    /// The document lengths of each pack.
    ///
    /// # Errors
    /// Lengths without a token; a file that cannot be read; a line that is not a pack.
    pub fn packs(&self) -> Result<Vec<Vec<usize>>, PlanCommandError> {
        let Some(path) = &self.jsonl else {
            if check(&self.lengths).is_err() {
                return Err(PlanCommandError::Flag {
                    flag: "lengths",
                    expected: "at least one token, and no more than 2^40",
                    got: format!("{:?}", self.lengths),
                });
            }
            return Ok(vec![self.lengths.clone()]);
        };
        let file = |source| PlanCommandError::File {
            path: path.clone(),
            source,
        };
        let text = fs::read_to_string(path).map_err(file)?;
        let packs = (text.lines().enumerate())
            .filter(|(_, line)| !line.trim().is_empty())
            .map(|(index, line)| {
                let read =
                    serde_json::from_str(line).map_err(|error| format!("got {line:?} ({error})"));
                let read = read.and_then(|read: Line| {
                    let (Line::Lengths(lengths) | Line::Named { lengths }) = read;
                    check(&lengths).map(|()| lengths)
                });
                read.map_err(|reason| PlanCommandError::Line {
                    path: path.clone(),
                    line: index + 1,
                    reason,
                })
            })
            .collect::<Result<Vec<_>, _>>()?;
        if packs.is_empty() {
            return Err(PlanCommandError::NoPacks { path: path.clone() });
        }
        Ok(packs)
    }

    /// The layouts asked for.
    #[must_use]
    pub fn layouts(&self) -> Vec<LayoutArg> {
        use LayoutArg::{Balanced, Contiguous, DualChunkSwap, HeadTail};
        match self.layout.is_empty() {
            true => vec![Contiguous, HeadTail, DualChunkSwap, Balanced],
            false => self.layout.clone(),
        }
    }

    /// The exchanges asked for.
    #[must_use]
    pub fn exchanges(&self) -> Vec<ExchangeArg> {
        use ExchangeArg::{AllGather, HeadAllToAll, LeftHalo, NeededOnly, Ring};
        match self.exchange.is_empty() {
            true => vec![AllGather, NeededOnly, LeftHalo, Ring, HeadAllToAll],
            false => self.exchange.clone(),
        }
    }

    /// The mask.
    #[must_use]
    pub fn mask(&self) -> MaskKind {
        match self.mask {
            MaskArg::Causal => MaskKind::Causal {
                window: self.window,
            },
            MaskArg::Full => MaskKind::Full,
        }
    }

    /// Sizes of a token.
    #[must_use]
    pub fn shape(&self) -> CostShape {
        CostShape {
            num_heads: self.heads,
            num_kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            v_head_dim: self.v_head_dim.unwrap_or(self.head_dim),
            bytes_per_element: match self.dtype {
                DtypeArg::Bf16 | DtypeArg::F16 => 2,
                DtypeArg::F32 => 4,
                DtypeArg::F64 => 8,
            },
        }
    }

    /// What it runs on.
    #[must_use]
    pub fn hardware(&self) -> Hardware {
        Hardware {
            link_gbs: self.link_gbs,
            tflops: self.tflops,
            copy_gbs: self.copy_gbs,
            latency_us: self.latency_us,
            overlap: !self.no_overlap,
        }
    }
}

fn check(lengths: &[usize]) -> Result<(), String> {
    let total = lengths
        .iter()
        .try_fold(0_usize, |sum, &len| sum.checked_add(len));
    match total {
        Some(1..=0x100_0000_0000) => Ok(()),
        Some(total) => Err(format!("got {total} tokens")),
        None => Err("got more than 64 bits count".to_owned()),
    }
}
