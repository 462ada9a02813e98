//! Attention with the signature of Burn's own.

use std::{
    collections::VecDeque,
    sync::{Mutex, PoisonError},
};

use burn::tensor::{Bool, Tensor, module, ops::AttentionModuleOptions};

use crate::{
    api::{check, varlen_attention},
    backends::VarlenAttentionBackend,
    definition::{AttentionError, AttentionOptions, Segment, Segments},
};

/// [`burn::tensor::module::attention`], fused where it can be: same arguments, same result up to
/// rounding, but no scores of the size `seq_len_q` × `seq_len_k`, forward and backward. Models change one
/// import to use it.
///
/// `query [batch, num_heads, seq_len_q, head_dim]`, `key [batch, num_heads, seq_len_k, head_dim]`,
/// `value [batch, num_heads, seq_len_k, val_dim]` -> `[batch, num_heads, seq_len_q, val_dim]`. Keys and
/// values may also have fewer heads, a divisor of `num_heads`, which Burn's function, and so a call that goes to it, does not take. Calls
/// with a mask, with a bias, causal ones with unequal lengths (Burn aligns them at the first key), and those
/// that no fused routine serves go to Burn's function.
///
/// # Panics
///
/// As Burn's function does.
pub fn attention<B: VarlenAttentionBackend>(
    query: Tensor<B, 4>,
    key: Tensor<B, 4>,
    value: Tensor<B, 4>,
    mask: Option<Tensor<B, 4, Bool>>,
    attn_bias: Option<Tensor<B, 4>>,
    options: AttentionModuleOptions,
) -> Tensor<B, 4> {
    let [batch, _, q_len, _] = query.dims();
    let [_, _, k_len, _] = key.dims();
    let plain = mask.is_none() && attn_bias.is_none();
    if plain && (!options.is_causal || q_len == k_len) {
        let segments = segments([batch, q_len, k_len], options.is_causal);
        let mut fused = AttentionOptions::new();
        (fused.scale, fused.softcap) = (options.scale, options.softcap);
        let served = segments.and_then(|segments| {
            check(&query, &key, &value, &segments, &fused)?;
            Ok(segments)
        });
        if let Ok(segments) = served {
            return varlen_attention(query, key, value, &segments, &fused);
        }
    }
    module::attention(query, key, value, mask, attn_bias, options)
}

/// Lists of segments that are remembered.
const REMEMBERED: usize = 32;

type Sizes = ([usize; 3], bool);

/// The latest lists of segments, so that the layers of a model share a schedule. They follow from the sizes
/// alone.
static LATEST: Mutex<VecDeque<(Sizes, Segments)>> = Mutex::new(VecDeque::new());

/// One segment per batch row.
fn segments(sizes: [usize; 3], causal: bool) -> Result<Segments, AttentionError> {
    let mut latest = LATEST.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, segments)) = latest.iter().find(|(key, _)| *key == (sizes, causal)) {
        return Ok(segments.clone());
    }
    let [batch, q_len, k_len] = sizes;
    let row = |row| Segment {
        q_row: row,
        q: 0..q_len,
        k_row: row,
        k: 0..k_len,
        k_position: 0,
        causal,
        window: None,
    };
    let list = (0..batch).map(row).collect();
    let segments = Segments::new(list, (batch, q_len), (batch, k_len))?;
    latest.truncate(REMEMBERED - 1);
    latest.push_front(((sizes, causal), segments.clone()));
    Ok(segments)
}
