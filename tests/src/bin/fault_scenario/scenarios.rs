//! What goes wrong, and where.

#[cfg(feature = "cuda")]
use std::time::Duration;

use burn_cp::plan::ExchangeStrategy;

use crate::model::{Output, Twist};

/// Something that goes wrong on one rank, and the mesh on which it does.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scenario {
    pub(crate) mesh: [usize; 2],
    pub(crate) rank: usize,
    pub(crate) exchange: ExchangeStrategy,
    pub(crate) overlap: bool,
    pub(crate) kind: Kind,
    /// Whether a rank may never end.
    pub(crate) detached: bool,
}

impl Scenario {
    pub(crate) fn world_size(&self) -> usize {
        self.mesh.iter().product()
    }

    /// The same with nothing that goes wrong.
    pub(crate) fn without_fault(self) -> Self {
        Self {
            rank: usize::MAX,
            kind: Kind::Leave,
            ..self
        }
    }

    /// Heads of queries, and of keys and values: as many as can be dealt out, where they are.
    pub(crate) fn num_heads(&self) -> [usize; 2] {
        match self.exchange {
            ExchangeStrategy::HeadAllToAll => [2 * self.mesh[1], self.mesh[1]],
            _ => [2, 1],
        }
    }
}

/// What a rank does where the others go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Act {
    Panic,
    PanicValue,
    Sleep,
    OtherCollective,
    HostMessage,
    Shape,
    Dtype,
    /// A kernel writes where nothing is; for so long the rank submits nothing more.
    #[cfg(feature = "cuda")]
    IllegalAddress(Duration),
}

impl Act {
    fn may_never_end(self) -> bool {
        match self {
            Self::Sleep => true,
            #[cfg(feature = "cuda")]
            Self::IllegalAddress(_) => true,
            _ => false,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Forward(Act),
    Backward(Act),
    Tower(Act),
    TowerBackward(Act),
    TowerOutput(Output),
    Attention(Twist),
    Error,
    ErrorBeforeBackward,
    Leave,
    LeaveBeforeBackward,
    Documents,
    Ids,
    Labels,
    Positions,
    Padding,
    Placement,
    Grids,
    Layout,
    SharedLeaf,
    LazyParameters,
    Frozen,
}

/// The exchange strategy that a name begins with, whether it overlaps, and the rest of the name.
fn exchange_of(name: &str) -> (ExchangeStrategy, bool, &str) {
    use ExchangeStrategy::{AllGather, HeadAllToAll, LeftHalo, NeededOnly, Ring};
    let known = [
        ("gather-overlap-", AllGather, true),
        ("gather-", AllGather, false),
        ("needed-overlap-", NeededOnly, true),
        ("halo-", LeftHalo, false),
        ("ring-", Ring, false),
        ("heads-", HeadAllToAll, false),
    ];
    let found = known.into_iter().find_map(|(prefix, exchange, overlap)| {
        let rest = name.strip_prefix(prefix)?;
        Some((exchange, overlap, rest))
    });
    found.unwrap_or((NeededOnly, false, name))
}

/// The scenario of a name.
pub(crate) fn scenario(name: &str) -> Option<Scenario> {
    use Kind::*;
    let (exchange, overlap, name) = exchange_of(name);
    let worlds = [("mesh-", [2, 2], 3), ("two-", [1, 2], 1), ("", [1, 3], 1)];
    let (name, mesh, rank) = worlds
        .into_iter()
        .find_map(|(prefix, mesh, rank)| Some((name.strip_prefix(prefix)?, mesh, rank)))?;
    let kind = match name {
        "panic-in-forward" => Forward(Act::Panic),
        "panic-with-a-value" => Forward(Act::PanicValue),
        "panic-in-backward" => Backward(Act::Panic),
        "panic-in-vision-tower" => Tower(Act::Panic),
        "panic-in-vision-backward" => TowerBackward(Act::Panic),
        "other-rows-from-vision-tower" => TowerOutput(Output::Row),
        "deepstack-from-vision-tower" => TowerOutput(Output::Deepstack),
        "other-dtype-from-vision-tower" => TowerOutput(Output::Dtype),
        "error-in-vision-tower" => TowerOutput(Output::Error),
        "error-in-forward" => Error,
        "error-before-backward" => ErrorBeforeBackward,
        "other-collective-in-forward" => Forward(Act::OtherCollective),
        "other-collective-in-backward" => Backward(Act::OtherCollective),
        "host-message-in-forward" => Forward(Act::HostMessage),
        "host-message-in-backward" => Backward(Act::HostMessage),
        "other-shape-in-forward" => Attention(Twist::HeadDim),
        "other-shape-in-backward" => Backward(Act::Shape),
        "other-dtype-in-forward" => Attention(Twist::Dtype),
        "other-dtype-in-backward" => Backward(Act::Dtype),
        "untracked-on-one-rank" => Attention(Twist::Detached),
        "other-mask" => Attention(Twist::Window),
        "other-documents" => Documents,
        "other-ids" => Ids,
        "other-labels" => Labels,
        "other-positions" => Positions,
        "other-padding" => Padding,
        "other-placement" => Placement,
        "other-grids" => Grids,
        "other-layout" => Layout,
        "never-arrives-in-forward" => Forward(Act::Sleep),
        "never-arrives-in-backward" => Backward(Act::Sleep),
        "leaves-in-forward" => Leave,
        "leaves-before-backward" => LeaveBeforeBackward,
        "shared-leaf" => SharedLeaf,
        "lazy-parameters" => LazyParameters,
        "other-parameters-trained" => Frozen,
        // The watchdog looks several times.
        #[cfg(feature = "cuda")]
        "illegal-address-in-forward" => Forward(Act::IllegalAddress(Duration::from_millis(500))),
        // The host goes on at once.
        #[cfg(feature = "cuda")]
        "illegal-address-in-backward" => Backward(Act::IllegalAddress(Duration::ZERO)),
        "no-fault" => Leave,
        _ => return None,
    };
    let detached = match kind {
        Forward(act) | Backward(act) => act.may_never_end(),
        _ => false,
    };
    let scenario = Scenario {
        mesh,
        rank,
        exchange,
        overlap,
        kind,
        detached,
    };
    Some(match name {
        "no-fault" => scenario.without_fault(),
        _ => scenario,
    })
}
