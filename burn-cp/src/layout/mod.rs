//! Which tokens form a document, and which rank holds which tokens.
//!
//! [`Documents`] is the one table that every way of describing documents (lengths, boundaries, ids,
//! masks) is turned into. [`TokenLayout`] says for every rank which token ranges it owns, in its local
//! order. A [`Placement`] says where the tokens of a batch stand in the rows that are
//! dealt out, where these are not the batch's own. A [`MaskKind`] names which tokens of its document a token sees; the
//! spans, prefixes and masks that are a document's own come with the table. A [`LayoutPolicy`] makes layouts; what comes after it sees ranges only and never asks how they
//! were dealt out.
//!
//! Pure host data, identical on every rank that starts from the same input. Nothing here knows
//! tensors, or what attention does with documents and masks.

mod align;
mod balanced;
mod dense_mask;
mod documents;
mod dual_chunk;
mod error;
mod local_runs;
mod mark_error;
mod marks;
mod mask;
mod placement;
mod policy;
mod sources;
#[cfg(test)]
mod tests;
mod thd;
mod token_layout;

pub use align::{AlignedDocuments, align_documents};
pub use balanced::{Visibility, least_kv_received};
pub use dense_mask::{DenseMask, SelfOnly};
pub use documents::{Document, Documents};
pub use error::LayoutError;
pub use local_runs::LocalRun;
pub use mark_error::MarkError;
pub(crate) use marks::check_spans;
pub use mask::MaskKind;
pub use placement::Placement;
pub use policy::LayoutPolicy;
pub use thd::{ThdMetadata, ThdTables};
pub use token_layout::{OwnedRange, TokenLayout};
