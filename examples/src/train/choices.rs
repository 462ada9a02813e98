//! Choices that programs offer by flag and by configuration file.

use burn_cp::{
    layout::{LayoutPolicy, Visibility},
    plan::ExchangeStrategy,
};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// Where a run computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Device {
    /// On the processor, by Flex.
    #[default]
    Cpu,
    /// On a GPU through Vulkan, Metal or WebGPU; a build with the feature `wgpu`.
    Wgpu,
    /// On an NVIDIA GPU; a build with the feature `cuda`.
    Cuda,
}

impl Device {
    /// What the program was built for.
    #[must_use]
    pub fn built() -> Vec<Self> {
        let mut devices = vec![Self::Cpu];
        devices.extend(cfg!(feature = "wgpu").then_some(Self::Wgpu));
        devices.extend(cfg!(feature = "cuda").then_some(Self::Cuda));
        devices
    }
}

/// How tokens are dealt out to ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Layout {
    /// Equal consecutive parts.
    Contiguous,
    /// A part from the front and one from the back, which balances causal attention over one long document.
    HeadTail,
    /// Head and tail of every document, which balances packed ones too; the packs of a step become one stream, and every
    /// document is padded to a multiple of two chunks per rank.
    DualChunkSwap,
    /// Even work and few keys and values received; the packs of a step become one stream, and ranks own unevenly many tokens.
    Balanced,
}

/// How keys and values get to the ranks that need them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Exchange {
    /// Every rank gets all of them.
    AllGather,
    /// Every rank gets those that its tokens see.
    NeededOnly,
    /// They pass round the ranks.
    Ring,
    /// Ranks trade tokens for heads, whose number they must divide.
    HeadAllToAll,
    /// What the cost model predicts to be fastest.
    Auto,
}

/// Where the vision tower runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Vision {
    /// Every rank encodes every frame.
    Replicated,
    /// Frames are split over the ranks, however few there are.
    Sharded,
}

/// Which ranks are given the vision tower's features.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Delivery {
    /// Every rank gets all of them.
    Gathered,
    /// Every rank gets those of its own tokens.
    ToConsumers,
}

/// What backward keeps and what it computes again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Checkpointing {
    /// Keep everything.
    None,
    /// Compute cheap operations again.
    Balanced,
}

/// Which model is trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum ModelSize {
    /// For comparisons: a few steps take seconds.
    Tiny,
    /// Learns the task in minutes.
    Small,
}

impl Layout {
    /// The layout by this name.
    pub fn policy(self) -> LayoutPolicy {
        match self {
            Self::Contiguous => LayoutPolicy::Contiguous { multiple: 1 },
            Self::HeadTail => LayoutPolicy::HeadTail,
            Self::DualChunkSwap => LayoutPolicy::DualChunkSwap,
            Self::Balanced => LayoutPolicy::Balanced {
                visibility: Visibility::default(),
            },
        }
    }

    /// What every document is padded to a multiple of, where the layout takes one stream of documents and so many ranks share it.
    pub fn alignment(self, ranks: usize) -> Option<usize> {
        match self {
            Self::Contiguous | Self::HeadTail => None,
            Self::DualChunkSwap => Some(2 * ranks),
            Self::Balanced => Some(1),
        }
    }
}

impl Exchange {
    /// The exchange by this name.
    pub fn strategy(self) -> ExchangeStrategy {
        match self {
            Self::AllGather => ExchangeStrategy::AllGather,
            Self::NeededOnly => ExchangeStrategy::NeededOnly,
            Self::Ring => ExchangeStrategy::Ring,
            Self::HeadAllToAll => ExchangeStrategy::HeadAllToAll,
            Self::Auto => ExchangeStrategy::Auto,
        }
    }
}
