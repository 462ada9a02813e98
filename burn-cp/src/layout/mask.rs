//! Which mask a document has, or a call of attention asks for.

use serde::{Deserialize, Serialize};

/// Which tokens of its own document a token attends to.
///
/// Positions are document positions: they number the real tokens of a document and skip padding inside
/// it. No mask lets a token see another document or padding.
///
/// A mask is what a call asks for. What is a document's own, its spans, its prefix, or a mask that is
/// not the other documents', comes with the [`Documents`](super::Documents).
///
/// In configuration files: `{ causal = {} }`, `{ causal = { window = 4095 } }`, `"full"`,
/// `{ causal-with-spans = {} }`, `{ prefix = {} }`, `{ per-document = {} }`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum MaskKind {
    /// The token itself and earlier ones.
    Causal {
        /// How many earlier tokens are visible besides the token itself; all of them if `None`.
        #[serde(default)]
        window: Option<usize>,
    },
    /// All tokens of the document.
    Full,
    /// The token itself, earlier ones, and all tokens of the bidirectional span that it belongs to, if
    /// any: the tokens of an image see each other. See [`Documents::with_spans`](super::Documents::with_spans).
    CausalWithSpans {
        /// Refused: it is not defined what of a span a window hides.
        #[serde(default)]
        window: Option<usize>,
        /// Refused if set: a prefix beside spans is not defined.
        #[serde(default)]
        prefix: bool,
    },
    /// The token itself, earlier ones, and all tokens of the document's prefix for those that belong to
    /// it. See [`Documents::with_prefixes`](super::Documents::with_prefixes).
    Prefix {
        /// Refused: it is not defined what of a prefix a window hides.
        #[serde(default)]
        window: Option<usize>,
    },
    /// Each document has the mask that came with it. See
    /// [`Documents::with_masks`](super::Documents::with_masks).
    PerDocument {
        /// Refused: windows are those of the documents.
        #[serde(default)]
        window: Option<usize>,
    },
}

impl MaskKind {
    /// Causal without a window.
    pub const CAUSAL: Self = Self::Causal { window: None };

    /// Causal with bidirectional spans.
    pub const CAUSAL_WITH_SPANS: Self = Self::CausalWithSpans {
        window: None,
        prefix: false,
    };

    /// Causal behind a prefix whose tokens see each other.
    pub const PREFIX: Self = Self::Prefix { window: None };

    /// Each document's own mask.
    pub const PER_DOCUMENT: Self = Self::PerDocument { window: None };

    /// The same with a window of `window` earlier tokens; causal, where the mask was full. Of the other
    /// masks none can have a window, which the plan says as an error.
    #[must_use]
    pub fn with_window(self, window: usize) -> Self {
        let window = Some(window);
        match self {
            Self::Causal { .. } | Self::Full => Self::Causal { window },
            Self::CausalWithSpans { prefix, .. } => Self::CausalWithSpans { window, prefix },
            Self::Prefix { .. } => Self::Prefix { window },
            Self::PerDocument { .. } => Self::PerDocument { window },
        }
    }

    /// Whether later tokens are hidden from every token.
    pub fn is_causal(self) -> bool {
        matches!(self, Self::Causal { .. })
    }

    /// The window, where there is one.
    pub fn window(self) -> Option<usize> {
        match self {
            Self::Full => None,
            Self::Causal { window }
            | Self::CausalWithSpans { window, .. }
            | Self::Prefix { window }
            | Self::PerDocument { window } => window,
        }
    }
}

impl Default for MaskKind {
    fn default() -> Self {
        Self::CAUSAL
    }
}
