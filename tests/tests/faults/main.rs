//! A fault on one rank ends every rank, and the launcher names the rank and the operation. Each fault runs in a process of its
//! own, which is killed if it hangs.

mod launcher;

use std::{process::Command, thread};

use burn_cp_tests::{
    OTHER_DTYPE_NAME,
    faults::{self, Ends, Expected, ROWS, Report, program, two_ranks},
};

fn run(name: &str) -> Report {
    let program = program("fault-scenario", env!("CARGO_BIN_EXE_fault-scenario"));
    faults::run(&program, name).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn check(name: &str, expected: &Expected) {
    let report = run(name);
    eprintln!("{name}: {}", report.line);
    if let Err(wrong) = report.judge(expected) {
        panic!("{name}: {wrong}: {}", report.line);
    }
    assert!(
        !report.stderr.contains("Box<dyn Any>") || name == "panic-with-a-value",
        "{name}: {}",
        report.stderr
    );
}

macro_rules! faults {
    ($($test:ident: $name:literal, rank $rank:literal, op $op:expr, cause $cause:expr, $ends:ident $(, $panics:ident)?;)*) => {
        $(
            #[test]
            fn $test() {
                let panics = [$(stringify!($panics)),*].contains(&"panics");
                check($name, &Expected { rank: $rank, op: &$op, cause: &$cause, ends: Ends::$ends, held_up: &[], panics });
            }
        )*
    };
}

faults! {
    a_panic_in_forward_ends_every_rank:
        "panic-in-forward", rank 1, op ["its own code, after", "attention"], cause ["panicked: the fault"], AtOnce, panics;
    a_panic_with_a_value_ends_every_rank:
        "panic-with-a-value", rank 1, op ["attention"], cause ["panicked: a value that is not a message"], AtOnce, panics;
    a_panic_in_backward_ends_every_rank:
        "panic-in-backward", rank 1, op ["adjoint"], cause ["panicked: the fault"], AtOnce, panics;
    a_panic_in_the_vision_tower_ends_every_rank:
        "panic-in-vision-tower", rank 1, op ["vision tower"], cause ["the fault"], AtOnce, panics;
    a_panic_in_the_towers_backward_ends_every_rank:
        "panic-in-vision-backward", rank 1, op ["adjoint"], cause ["panicked: the fault"], AtOnce, panics;
    an_error_of_one_vision_tower_ends_every_rank:
        "error-in-vision-tower", rank 1, op ["vision tower"], cause ["the tower ran dry"], AtOnce;
    another_number_of_rows_from_one_vision_tower_ends_every_rank:
        "other-rows-from-vision-tower", rank 1, op ["vision tower"], cause ["rows"], AtOnce;
    deepstack_from_one_vision_tower_only_ends_every_rank:
        "deepstack-from-vision-tower", rank 1, op ["vision tower"], cause ["1 deepstack layers"], AtOnce;
    another_dtype_from_one_vision_tower_ends_every_rank:
        "other-dtype-from-vision-tower", rank 1, op ["vision tower"], cause [OTHER_DTYPE_NAME], AtOnce;
    an_error_before_a_collective_ends_every_rank:
        "error-in-forward", rank 1, op ["its own code"], cause ["the data loader ran dry"], AtOnce;
    an_error_before_backward_ends_every_rank:
        "error-before-backward", rank 1, op ["its own code"], cause ["the data loader ran dry"], AtOnce;
    another_collective_in_forward_is_named:
        "other-collective-in-forward", rank 1, op ["all_reduce"],
        cause ["rank 1 calls all_reduce", "expected exchange[attention]"], AtOnce;
    another_collective_in_backward_is_named:
        "other-collective-in-backward", rank 1, op ["all_reduce"],
        cause ["rank 1 calls all_reduce", "adjoint of"], AtOnce;
    a_host_message_in_forward_is_named:
        "host-message-in-forward", rank 1, op ["barrier"], cause ["rank 1 calls barrier", "exchange[attention]"], AtOnce;
    a_host_message_in_backward_is_named:
        "host-message-in-backward", rank 1, op ["barrier"], cause ["rank 1 calls barrier", "adjoint of"], AtOnce;
    another_shape_in_forward_is_named:
        "other-shape-in-forward", rank 1, op ["exchange[attention]"], cause [ROWS[0], ROWS[1]], AtOnce;
    another_shape_in_backward_is_named:
        "other-shape-in-backward", rank 1, op ["all_reduce", "[5]"], cause ["[4]", "[5]"], AtOnce;
    another_dtype_in_forward_is_named:
        "other-dtype-in-forward", rank 1, op ["exchange[attention]", OTHER_DTYPE_NAME], cause ["F32", OTHER_DTYPE_NAME], AtOnce;
    another_dtype_in_backward_is_named:
        "other-dtype-in-backward", rank 1, op ["all_reduce", OTHER_DTYPE_NAME], cause ["F32", OTHER_DTYPE_NAME], AtOnce;
    a_gradient_tracked_on_some_ranks_only_is_named:
        "untracked-on-one-rank", rank 1, op ["exchange[attention]"], cause ["tracked"], AtOnce;
    another_mask_is_named:
        "other-mask", rank 1, op ["exchange[attention]"], cause ["plan"], AtOnce;
    other_documents_are_named:
        "other-documents", rank 1, op ["the plan of the step"], cause ["disagree on the plan of the step: rank 1"], AtOnce;
    other_ids_are_named:
        "other-ids", rank 1, op ["the plan of the step"], cause ["disagree on the plan of the step: rank 1"], AtOnce;
    other_positions_are_named:
        "other-positions", rank 1, op ["the plan of the step"], cause ["disagree on the plan of the step: rank 1"], AtOnce;
    other_padding_is_named:
        "other-padding", rank 1, op ["the plan of the step"], cause ["disagree on the plan of the step: rank 1"], AtOnce;
    another_placement_is_named:
        "other-placement", rank 1, op ["the plan of the step"], cause ["disagree on the plan of the step: rank 1"], AtOnce;
    other_labels_are_named:
        "other-labels", rank 1, op ["the plan of the step"], cause ["disagree on the plan of the step: rank 1"], AtOnce;
    other_grids_are_named:
        "other-grids", rank 1, op ["the plan of the step"], cause ["disagree on the plan of the step: rank 1"], AtOnce;
    another_layout_is_named:
        "other-layout", rank 1, op ["the plan of the step"], cause ["disagree on the plan of the step: rank 1"], AtOnce;
    a_rank_that_never_arrives_is_named_at_the_deadline:
        "never-arrives-in-forward", rank 1, op ["exchange[attention]"],
        cause ["ranks [1] had not arrived", "last seen in exchange[attention]"], AtDeadline;
    a_rank_that_never_arrives_in_backward_is_named_at_the_deadline:
        "never-arrives-in-backward", rank 1, op ["adjoint of"], cause ["ranks [1] had not arrived", "last seen in"], AtDeadline;
    a_rank_that_returns_in_forward_is_not_waited_for:
        "leaves-in-forward", rank 1, op ["exchange[attention]"], cause ["rank 1 ended without arriving"], AtOnce;
    a_rank_that_returns_before_backward_is_not_waited_for:
        "leaves-before-backward", rank 1, op ["barrier"], cause ["rank 1 ended without arriving"], AtOnce;
    ranks_that_share_a_leaf_are_refused:
        "shared-leaf", rank 2, op ["start-up check of parameters"], cause ["ranks 1 and 2 share the leaf of", "fork"], AtOnce;
    ranks_that_start_with_other_parameters_are_refused:
        "lazy-parameters", rank 1, op ["start-up check of parameters"],
        cause ["ranks start with different parameters: rank 1", "embedding.weight"], AtOnce;
    ranks_that_train_other_parameters_are_named:
        "other-parameters-trained", rank 1, op ["all_reduce"], cause ["rank 1 calls all_reduce"], AtOnce;

    a_panic_in_one_of_two_groups_ends_both:
        "mesh-panic-in-forward", rank 3, op ["attention", "cp[2, 3]"], cause ["panicked: the fault"], AtOnce, panics;
    a_panic_in_backward_in_one_of_two_groups_ends_both:
        "mesh-panic-in-backward", rank 3, op ["adjoint", "cp[2, 3]"], cause ["panicked: the fault"], AtOnce, panics;
    a_panic_in_the_vision_tower_of_one_of_two_groups_ends_both:
        "mesh-panic-in-vision-tower", rank 3, op ["vision tower"], cause ["the fault"], AtOnce, panics;
    an_error_of_a_vision_tower_of_one_of_two_groups_ends_both:
        "mesh-error-in-vision-tower", rank 3, op ["vision tower"], cause ["the tower ran dry"], AtOnce;
    another_number_of_rows_from_a_vision_tower_of_one_of_two_groups_ends_both:
        "mesh-other-rows-from-vision-tower", rank 3, op ["vision tower"], cause ["rows"], AtOnce;
    deepstack_from_one_vision_tower_of_one_of_two_groups_ends_both:
        "mesh-deepstack-from-vision-tower", rank 3, op ["vision tower"], cause ["1 deepstack layers"], AtOnce;
    another_placement_in_one_of_two_groups_ends_both:
        "mesh-other-placement", rank 3, op ["the plan of the step"], cause ["rank 3"], AtOnce;
    an_error_in_one_of_two_groups_ends_both:
        "mesh-error-in-forward", rank 3, op ["its own code"], cause ["the data loader ran dry"], AtOnce;
    another_collective_in_one_of_two_groups_ends_both:
        "mesh-other-collective-in-forward", rank 3, op ["all_reduce", "cp[2, 3]"], cause ["rank 3 calls all_reduce"], AtOnce;
    other_documents_in_one_of_two_groups_end_both:
        "mesh-other-documents", rank 3, op ["the plan of the step"], cause ["rank 3"], AtOnce;
    a_rank_of_one_of_two_groups_that_never_arrives_is_named_at_the_deadline:
        "mesh-never-arrives-in-forward", rank 3, op ["exchange[attention]", "cp[2, 3]"], cause ["last seen in"], AtDeadline;
    other_parameters_in_one_of_two_groups_are_refused:
        "mesh-lazy-parameters", rank 3, op ["start-up check of parameters"], cause ["rank 3", "embedding.weight"], AtOnce;
}

/// The launcher reports it in time, and so do the ranks that wait between ranks. The other group's ranks have ended their
/// backward pass by then; Burn's clean-up behind it takes the lock of every graph of the process, the sleeping rank's too, and
/// nothing can wake them.
#[test]
fn a_rank_of_one_of_two_groups_that_never_arrives_in_backward_is_named_at_the_deadline() {
    let expected = Expected {
        rank: 3,
        op: &["adjoint of", "cp[2, 3]"],
        cause: &["ranks [3] had not arrived", "last seen in"],
        ends: Ends::AtDeadline,
        held_up: &[0, 1],
        panics: false,
    };
    check("mesh-never-arrives-in-backward", &expected);
}

/// Prefixes of scenarios, one per exchange strategy and overlap besides the one that all others run with.
const STRATEGIES: [&str; 6] = [
    "gather",
    "gather-overlap",
    "needed-overlap",
    "halo",
    "ring",
    "heads",
];

/// The same fault under every strategy, all at once: most of them wait most of the time.
fn check_strategies(name: &str, expected: &Expected) {
    thread::scope(|scope| {
        for strategy in STRATEGIES {
            scope.spawn(move || check(&format!("{strategy}-{name}"), expected));
        }
    });
}

macro_rules! faults_under_every_strategy {
    ($($test:ident: $name:literal, op $op:expr, cause $cause:expr, $ends:ident $(, $panics:ident)?;)*) => {
        $(
            #[test]
            fn $test() {
                let panics = [$(stringify!($panics)),*].contains(&"panics");
                let expected = Expected { rank: 1, op: &$op, cause: &$cause, ends: Ends::$ends, held_up: &[], panics };
                check_strategies($name, &expected);
            }
        )*
    };
}

faults_under_every_strategy! {
    a_panic_in_forward_ends_every_rank_under_every_strategy:
        "panic-in-forward", op ["its own code, after", "attention"], cause ["panicked: the fault"], AtOnce, panics;
    a_panic_in_backward_ends_every_rank_under_every_strategy:
        "panic-in-backward", op ["its own code, after", "adjoint"], cause ["panicked: the fault"], AtOnce, panics;
    an_error_in_forward_ends_every_rank_under_every_strategy:
        "error-in-forward", op ["its own code"], cause ["the data loader ran dry"], AtOnce;
    an_error_before_backward_ends_every_rank_under_every_strategy:
        "error-before-backward", op ["its own code"], cause ["the data loader ran dry"], AtOnce;
    another_shape_in_forward_is_named_under_every_strategy:
        "other-shape-in-forward", op ["[attention]"], cause ["rank 1 calls", "[attention]", "*, "], AtOnce;
    another_shape_in_backward_is_named_under_every_strategy:
        "other-shape-in-backward", op ["all_reduce", "[5]"], cause ["[4]", "[5]"], AtOnce;
    another_collective_in_backward_is_named_under_every_strategy:
        "other-collective-in-backward", op ["all_reduce"], cause ["rank 1 calls all_reduce", "adjoint of"], AtOnce;
    a_rank_that_never_arrives_is_named_under_every_strategy:
        "never-arrives-in-forward", op ["[attention]"], cause ["ranks [1] had not arrived", "last seen in"], AtDeadline;
    a_rank_that_never_arrives_in_backward_is_named_under_every_strategy:
        "never-arrives-in-backward", op ["adjoint of"], cause ["ranks [1] had not arrived", "last seen in"], AtDeadline;
}

/// Without a fault the step runs through, so that the scenarios above fail for the reason they are named for.
#[test]
fn without_a_fault_every_rank_succeeds() {
    let strategies = STRATEGIES.map(|strategy| format!("{strategy}-no-fault"));
    let names = ["no-fault", "two-no-fault", "mesh-no-fault"].map(str::to_owned);
    let two = STRATEGIES.map(|strategy| format!("{strategy}-two-no-fault"));
    for name in names.iter().chain(&strategies).chain(&two) {
        let Report { line, stderr } = run(name);
        assert!(
            line["rank"].is_null() && line["cause"] == "every rank succeeded",
            "{name}: {line}"
        );
        assert!(!stderr.contains("panicked"), "{stderr}");
    }
}

/// Also the order in which they are tried is drawn.
#[test]
fn rounds_of_mixed_faults_among_two_ranks_end_as_expected() {
    let rounds = program("fault-rounds", env!("CARGO_BIN_EXE_fault-rounds"));
    let num_rounds = two_ranks().len().to_string();
    let output = Command::new(rounds)
        .args(["--seed", "7", "--rounds", &num_rounds])
        .output()
        .expect("the program starts");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}");
    assert_eq!(text.lines().count(), two_ranks().len() + 1, "{text}");
}
