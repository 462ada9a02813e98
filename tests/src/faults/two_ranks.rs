//! What goes wrong between two ranks, and how each is expected to end.

use super::{Ends, Expected, may_not_meet};
use crate::OTHER_DTYPE_NAME;

/// A fault among two ranks.
#[derive(Debug, Clone, Copy)]
pub struct Fault {
    /// Name of the scenario.
    pub name: &'static str,
    /// Whether it ends so under every exchange strategy.
    pub under_every_strategy: bool,
    /// How it ends.
    pub expected: Expected,
}

const fn fault(
    name: &'static str,
    op: &'static [&'static str],
    cause: &'static [&'static str],
) -> Fault {
    Fault {
        name,
        under_every_strategy: false,
        expected: Expected {
            rank: 1,
            op,
            cause,
            ends: Ends::AtOnce,
            held_up: &[],
            panics: false,
        },
    }
}

impl Fault {
    const fn under_every_strategy(mut self) -> Self {
        self.under_every_strategy = true;
        self
    }

    const fn panics(mut self) -> Self {
        self.expected.panics = true;
        self
    }

    const fn ends(mut self, ends: Ends) -> Self {
        self.expected.ends = ends;
        self
    }

    #[cfg(feature = "cuda")]
    const fn of_any_rank(mut self) -> Self {
        self.expected.rank = super::ANY_RANK;
        self
    }

    const fn holds_up(mut self, ranks: &'static [usize]) -> Self {
        self.expected.held_up = ranks;
        self
    }
}

const MET: bool = !may_not_meet(2);

/// The operation of a rank that others wait for.
const fn op(known: &'static [&'static str]) -> &'static [&'static str] {
    if MET { known } else { &[] }
}

/// Ranks that fail in their own code.
fn failures() -> Vec<Fault> {
    vec![
        fault(
            "two-panic-in-forward",
            &["its own code, after", "attention"],
            &["panicked: the fault"],
        )
        .under_every_strategy()
        .panics(),
        fault(
            "two-panic-in-backward",
            &["its own code, after", "adjoint"],
            &["panicked: the fault"],
        )
        .under_every_strategy()
        .panics(),
        fault(
            "two-panic-in-vision-tower",
            &["vision tower"],
            &["the fault"],
        )
        .panics(),
        fault(
            "two-panic-in-vision-backward",
            &["adjoint"],
            &["panicked: the fault"],
        )
        .panics(),
        fault(
            "two-error-in-vision-tower",
            &["vision tower"],
            &["the tower ran dry"],
        ),
        fault(
            "two-error-in-forward",
            &["its own code"],
            &["the data loader ran dry"],
        )
        .under_every_strategy(),
        fault(
            "two-error-before-backward",
            &["its own code"],
            &["the data loader ran dry"],
        )
        .under_every_strategy(),
    ]
}

/// Ranks that call something else than the others.
fn calls() -> Vec<Fault> {
    const OTHER_CALL: &[&str] = &["rank 1 calls all_reduce"];
    vec![
        fault(
            "two-other-collective-in-forward",
            &["all_reduce"],
            OTHER_CALL,
        ),
        fault(
            "two-other-collective-in-backward",
            &["all_reduce"],
            OTHER_CALL,
        )
        .under_every_strategy(),
        fault(
            "two-other-shape-in-forward",
            &["[attention]"],
            &["rank 1 calls", "[attention]", "*, "],
        )
        .under_every_strategy(),
        fault(
            "two-other-shape-in-backward",
            &["all_reduce", "[5]"],
            &["[4]", "[5]"],
        )
        .under_every_strategy(),
        fault(
            "two-other-dtype-in-forward",
            &["exchange[attention]"],
            &["F32", OTHER_DTYPE_NAME],
        ),
        fault(
            "two-other-dtype-in-backward",
            &["all_reduce"],
            &["F32", OTHER_DTYPE_NAME],
        ),
        fault(
            "two-untracked-on-one-rank",
            &["exchange[attention]"],
            &["tracked"],
        ),
        fault("two-other-mask", &["exchange[attention]"], &["plan"]),
        fault("two-other-parameters-trained", &["all_reduce"], OTHER_CALL),
    ]
}

/// Faults that are found on the host, before anything is exchanged.
fn checks() -> Vec<Fault> {
    const PLAN: &[&str] = &["the plan of the step"];
    const DIFFERS: &[&str] = &["disagree on the plan of the step: rank 1"];
    const START: &[&str] = &["start-up check of parameters"];
    vec![
        fault(
            "two-other-rows-from-vision-tower",
            &["vision tower"],
            &["rows"],
        ),
        fault(
            "two-deepstack-from-vision-tower",
            &["vision tower"],
            &["1 deepstack layers"],
        ),
        fault(
            "two-other-dtype-from-vision-tower",
            &["vision tower"],
            &[OTHER_DTYPE_NAME],
        ),
        fault("two-other-documents", PLAN, DIFFERS),
        fault("two-other-ids", PLAN, DIFFERS),
        fault("two-other-labels", PLAN, DIFFERS),
        fault("two-other-positions", PLAN, DIFFERS),
        fault("two-other-padding", PLAN, DIFFERS),
        fault("two-other-placement", PLAN, DIFFERS),
        fault("two-other-grids", PLAN, DIFFERS),
        fault("two-other-layout", PLAN, DIFFERS),
        fault(
            "two-shared-leaf",
            START,
            &["ranks 0 and 1 share the leaf of", "fork"],
        ),
        fault(
            "two-lazy-parameters",
            START,
            &["different parameters: rank 1", "embedding.weight"],
        ),
    ]
}

/// Ranks that others wait for in vain.
fn absences() -> Vec<Fault> {
    const LATE: &[&str] = &["ranks [1] had not arrived", "last seen in"];
    const GONE: &[&str] = &["rank 1 ended without arriving"];
    let leaves = if MET { Ends::AtOnce } else { Ends::ByDeadline };
    // A rank that nothing holds up in its backward pass is held up behind it: Burn's clean-up takes the lock of every graph, the
    // sleeping rank's too.
    let behind: &[usize] = if MET { &[] } else { &[0] };
    vec![
        fault("two-never-arrives-in-forward", op(&["[attention]"]), LATE)
            .under_every_strategy()
            .ends(Ends::AtDeadline),
        fault("two-never-arrives-in-backward", op(&["adjoint of"]), LATE)
            .under_every_strategy()
            .ends(Ends::AtDeadline)
            .holds_up(behind),
        fault("two-leaves-in-forward", op(&["exchange[attention]"]), GONE).ends(leaves),
        fault("two-leaves-before-backward", &["barrier"], GONE),
    ]
}

/// An illegal address breaks the device for its rank, and what NCCL's kernels of the other rank do with that device's memory.
#[cfg(feature = "cuda")]
fn broken_devices() -> Vec<Fault> {
    const ILLEGAL: &[&str] = &["ILLEGAL_ADDRESS"];
    vec![
        fault("two-illegal-address-in-forward", &[], ILLEGAL)
            .under_every_strategy()
            .ends(Ends::ByDeadline)
            .of_any_rank(),
        // The rank may notice when it reads something, in words that are Burn's.
        fault("two-illegal-address-in-backward", &[], &[])
            .under_every_strategy()
            .ends(Ends::ByDeadline)
            .of_any_rank(),
    ]
}

/// Every fault among two ranks.
pub fn two_ranks() -> Vec<Fault> {
    let all = [failures(), calls(), checks(), absences()].concat();
    #[cfg(feature = "cuda")]
    let all = [all, broken_devices()].concat();
    all
}
