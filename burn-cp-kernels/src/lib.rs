//! Varlen attention for [Burn](https://burn.dev), on one device.
//!
//! Packed documents attend only within themselves. Which run of queries sees which run of keys is
//! said by [`Segments`]; [`varlen_attention`] computes the attention of all of them, with
//! gradients under `Autodiff`, and costs what the visible pairs cost: no padding, no scores of the
//! size tokens × tokens.
//!
//! ```
//! use burn::{backend::Flex, tensor::{Distribution, Tensor}};
//! use burn_cp_kernels::{AttentionOptions, Segment, Segments, varlen_attention};
//!
//! let device = Default::default();
//! let random = |heads| Tensor::<Flex, 4>::random([1, heads, 8, 16], Distribution::Default, &device);
//! // Two packed documents; two query heads share a key head.
//! let document = |tokens: std::ops::Range<usize>| Segment {
//!     q_row: 0, q: tokens.clone(), k_row: 0, k: tokens, k_position: 0, causal: true, window: None,
//! };
//! let segments = Segments::new(vec![document(0..3), document(3..8)], (1, 8), (1, 8))?;
//! let out = varlen_attention(random(4), random(2), random(2), &segments, &AttentionOptions::new());
//! assert_eq!(out.dims(), [1, 4, 8, 16]);
//! # Ok::<(), burn_cp_kernels::AttentionError>(())
//! ```
//!
//! Rooms: `definition` (host data: segments, options, errors), `routines` (how attention is
//! computed), `components` and `kernels` (what runs on a device), `launch` (host data and tensors to
//! launched kernels), `backends` (which backend uses which routine, and the autodiff op), and, behind the
//! feature `reference`, a plain f64 implementation for tests. The crate knows one device: ranks,
//! meshes and exchanges are not its business.

mod api;
mod backends;
#[cfg(feature = "cubecl")]
mod components;
mod definition;
mod drop_in;
#[cfg(feature = "cubecl")]
mod kernels;
#[cfg(feature = "cubecl")]
mod launch;
#[cfg(feature = "reference")]
pub mod reference;
// Without a backend that uses it, the composed routine has no caller.
#[cfg_attr(
    not(any(feature = "flex", feature = "ndarray", feature = "cubecl")),
    allow(dead_code, unused_imports)
)]
mod routines;

pub use api::{
    attention_backward, attention_forward, attention_forward_with_sinks, check, describe,
    merge_attention, varlen_attention, varlen_attention_with_sinks,
};
#[cfg(feature = "cubecl")]
pub use backends::AttentionRuntime;
pub use backends::{AttentionBackend, VarlenAttentionBackend};
pub use definition::{
    AttentionBackwardInput, AttentionError, AttentionGradients, AttentionInput, AttentionOptions,
    AttentionOutput, AttentionProblem, Dropout, DropoutPlace, Routine, RoutineChoice, Segment,
    Segments, Window,
};
pub use drop_in::attention;
