//! Context parallelism for Burn: sequences sharded over ranks, attention that exchanges only the keys and values it needs, the
//! vision tower split by frames; loss and gradients equal those of one device.
//!
//! The rooms, in the order in which data flows; each uses those above it only:
//!
//! | room | holds |
//! | --- | --- |
//! | [`mesh`] | named axes, ranks and coordinates |
//! | [`layout`] | which tokens form documents, and which rank owns which tokens |
//! | [`plan`] | which rank computes what, and which tokens move |
//! | [`comm`] | process groups, transports, failures |
//! | [`collectives`] | differentiable collectives on tensors |
//! | [`batch`] | what a model is fed |
//! | [`vision`] | the vision tower, split by frames |
//! | [`attention`] | exchange and kernel as one operation |
//! | [`sharder`] | batches to steps, and the token verbs |
//! | [`recurrent`] | sequence order, causal convolutions and states across ranks |
//! | [`nn`] | models and layers over steps |
//! | [`loss`], [`optim`] | token-mean losses, gradients over ranks |
//! | [`launch`] | ranks as threads or processes |
//! | `train` | runs that burn-train drives (feature `train`) |
//!
//! `backends` is the one place that knows Burn's internals.

pub mod attention;
mod backends;
pub mod batch;
pub mod collectives;
pub mod comm;
mod field_path;
pub mod launch;
pub mod layout;
pub mod loss;
pub mod mesh;
pub mod nn;
pub mod optim;
pub mod plan;
pub mod recurrent;
pub mod sharder;
#[cfg(feature = "train")]
pub mod train;
pub mod vision;

#[cfg(feature = "cubecl")]
pub use backends::CollectiveRuntime;
pub use backends::cat;

#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct ReadmeExample;
