//! Attention of `burn::nn` that was left as it is in a model whose sequences are sharded.
//!
//! Such a layer sees the tokens of its own rank and none of the others', across documents: a wrong result without an error. The
//! audit finds Burn's layers by their types' names in the module tree. **It cannot see attention that a model computes by hand**,
//! nor layers in fields that the tree leaves out (`#[module(skip)]`), nor other layers in which tokens meet, such as recurrences
//! and convolutions over the sequence.

use std::fmt;

use burn::{
    module::{Module, ModuleVisitor},
    tensor::backend::Backend,
};

/// The types of `burn::nn` whose forward pass is attention, and the fields by which they are told from others of that name.
const ATTENTION: [&str; 2] = ["Struct:MultiHeadAttention", "Struct:CrossAttention"];
const FIELDS: [&str; 4] = ["query", "key", "value", "output"];

pub(super) fn is_attention(container_type: &str) -> bool {
    ATTENTION.contains(&container_type)
}

/// A layer that the audit found.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct UnconvertedAttention {
    /// Where it stands in the model: field names and indices, joined by dots.
    pub path: String,
    /// Its type in `burn::nn`.
    pub kind: String,
}

impl fmt::Display for UnconvertedAttention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.path, self.kind)
    }
}

/// A model with attention of `burn::nn` that would see its own rank's tokens only.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "attention of burn::nn would see the tokens of its own rank only: {}; convert it (ContextParallelAttention, \
     ContextParallelEncoder or ContextParallelDecoder::try_from), or allow its path where it never runs on a sharded \
     sequence. Attention written by hand is not found by this audit",
    listed(.found)
)]
#[non_exhaustive]
pub struct AuditError {
    /// At least one, in the order of the module tree.
    pub found: Vec<UnconvertedAttention>,
}

fn listed(found: &[UnconvertedAttention]) -> String {
    let items: Vec<String> = found.iter().map(ToString::to_string).collect();
    items.join(", ")
}

/// Looks for attention of `burn::nn` that has not been converted. Pure host, and the same answer on every rank.
///
/// ```
/// use burn::{backend::Flex, nn::transformer::TransformerEncoderConfig};
/// use burn_cp::nn::{AttentionAudit, ContextParallelEncoder};
///
/// let encoder = TransformerEncoderConfig::new(16, 32, 2, 1).init::<Flex>(&Default::default());
/// let error = AttentionAudit::new().check(&encoder).unwrap_err();
/// assert_eq!(error.found[0].path, "layers.0.mha");
/// let encoder = ContextParallelEncoder::try_from(encoder).unwrap();
/// assert!(AttentionAudit::new().check(&encoder).is_ok());
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct AttentionAudit {
    allowed: Vec<String>,
}

impl AttentionAudit {
    /// Allows nothing.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Allows the layer at this path of the module tree, and all below it, such as `"vision"`: what never runs on a sharded
    /// sequence, since it attends within one frame, or is given whole sequences. `""` allows every layer.
    #[must_use]
    pub fn allow(mut self, path: impl Into<String>) -> Self {
        self.allowed.push(path.into());
        self
    }

    /// The layers that are not allowed, in the order of the module tree.
    pub fn unconverted<B: Backend, M: Module<B>>(&self, model: &M) -> Vec<UnconvertedAttention> {
        let mut find = Find::default();
        model.visit(&mut find);
        let burns = find
            .found
            .into_iter()
            .filter(|(_, fields)| FIELDS.iter().all(|name| fields.iter().any(|f| f == name)))
            .map(|(layer, _)| layer);
        burns.filter(|layer| !self.allows(&layer.path)).collect()
    }

    /// Is there none left?
    ///
    /// # Errors
    /// All that there are.
    pub fn check<B: Backend, M: Module<B>>(&self, model: &M) -> Result<(), AuditError> {
        let found = self.unconverted(model);
        if found.is_empty() {
            Ok(())
        } else {
            Err(AuditError { found })
        }
    }

    fn allows(&self, path: &str) -> bool {
        self.allowed.iter().any(|allowed| {
            let rest = path.strip_prefix(allowed.as_str());
            allowed.is_empty() || rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        })
    }
}

#[derive(Default)]
struct Find {
    path: Vec<String>,
    /// Each layer with the fields that were entered.
    found: Vec<(UnconvertedAttention, Vec<String>)>,
}

impl<B: Backend> ModuleVisitor<B> for Find {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        if is_attention(container_type) {
            let path = self.path.join(".");
            let at = self.found.iter().position(|(layer, _)| layer.path == path);
            let at = at.unwrap_or_else(|| {
                let kind = container_type.trim_start_matches("Struct:").to_owned();
                self.found
                    .push((UnconvertedAttention { path, kind }, Vec::new()));
                self.found.len() - 1
            });
            self.found[at].1.push(name.to_owned());
        }
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }
}
