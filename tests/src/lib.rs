//! What the tests across ranks share: random inputs, host arrays, worlds of threads, and attention written twice without any
//! code of burn-cp, once in plain `f64` and once in Burn's tensor operations.
//!
//! Nothing here is a test.

mod attention;
mod backend;
mod cases;
mod device;
pub mod faults;
mod forms;
mod host;
mod random;
mod worlds;

pub use attention::{
    Attention, Problem, attention_in_f64, attention_in_tensor_ops, attention_with_sinks_in_f64,
    visible,
};
pub use backend::{DEVICE, DTYPES, OTHER_DTYPE, OTHER_DTYPE_NAME, TestBackend, head_dim};
pub use cases::{
    random_documents, random_exchange, random_layout, random_marks, random_mask, random_placement,
    span_tokens, unmarked,
};
pub use device::{device, enter_rank};
pub use forms::Form;
pub use host::{Host, bools_as_ints, floats, ints, relative_error, to_bits};
pub use random::Random;
pub use worlds::{DEADLINE, backward, on_groups, on_ranks, sharder, with_deadline};

/// The guide's code, compiled and run.
#[cfg(doctest)]
mod guide {
    #[doc = include_str!("../../docs/concepts.md")]
    struct Concepts;
    #[doc = include_str!("../../docs/layout-and-exchange.md")]
    struct LayoutAndExchange;
    #[doc = include_str!("../../docs/vision-tower.md")]
    struct VisionTower;
    #[doc = include_str!("../../docs/loss-and-gradients.md")]
    struct LossAndGradients;
    #[doc = include_str!("../../docs/debugging.md")]
    struct Debugging;
    #[doc = include_str!("../../docs/gpus.md")]
    struct Gpus;
    #[doc = include_str!("../../docs/processes.md")]
    struct Processes;
    #[doc = include_str!("../../docs/faq.md")]
    struct Faq;
}
