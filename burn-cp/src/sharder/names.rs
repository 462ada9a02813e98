//! How layouts, exchanges and streams are named in configuration files.

use std::{fmt, ops::Range};

use serde::{
    Deserialize, Deserializer,
    de::{Error, IgnoredAny, MapAccess, Visitor},
};

use super::PrimaryStream;
use crate::{
    layout::{LayoutPolicy, Visibility},
    plan::ExchangeStrategy,
};

pub(super) const DEFAULT_LAYOUT: LayoutPolicy = LayoutPolicy::Contiguous { multiple: 1 };
pub(super) const DEFAULT_EXCHANGE: ExchangeStrategy = ExchangeStrategy::NeededOnly;

/// Names for the default of any field.
const DEFAULT_NAMES: [&str; 3] = ["", "auto", "default"];

/// One value, the name that it is written with, and the further names, normalised, that it is read by.
struct Name<T> {
    value: T,
    written: &'static str,
    also: &'static [&'static str],
}

/// Something known by these names, normalised, that this version does not have.
struct Unbuilt {
    written: &'static str,
    also: &'static [&'static str],
}

/// All that a field can be called.
struct Names<T: 'static> {
    default: T,
    names: &'static [Name<T>],
    unbuilt: &'static [Unbuilt],
}

const EXCHANGES: Names<ExchangeStrategy> = Names {
    default: DEFAULT_EXCHANGE,
    names: &[
        Name {
            value: ExchangeStrategy::NeededOnly,
            written: "needed-only",
            also: &[
                "needed",
                "halo",
                "neighbor",
                "neighbour",
                "a2a",
                "a2av",
                "alltoall",
                "all_to_all",
                "needed_a2a",
            ],
        },
        Name {
            value: ExchangeStrategy::AllGather,
            written: "all-gather",
            also: &["allgather"],
        },
    ],
    unbuilt: &[
        Unbuilt {
            written: "ring",
            also: &["ring_attention", "p2p"],
        },
        Unbuilt {
            written: "head-all-to-all",
            also: &["head_a2a", "ulysses"],
        },
    ],
};

const PRIMARIES: Names<PrimaryStream> = Names {
    default: PrimaryStream::Sharded,
    names: &[
        Name {
            value: PrimaryStream::Sharded,
            written: "sharded",
            also: &[],
        },
        Name {
            value: PrimaryStream::Whole,
            written: "whole",
            also: &[],
        },
    ],
    unbuilt: &[],
};

/// The layouts, before their own values are known.
#[derive(Debug, Clone, Copy, PartialEq)]
enum LayoutName {
    Contiguous,
    HeadTail,
    DualChunkSwap,
    Balanced,
    Identity,
    Custom,
}

const LAYOUTS: Names<LayoutName> = Names {
    default: LayoutName::Contiguous,
    names: &[
        Name {
            value: LayoutName::Contiguous,
            written: "contiguous",
            also: &[],
        },
        Name {
            value: LayoutName::HeadTail,
            written: "head-tail",
            also: &["round_robin", "load_balanced", "zigzag"],
        },
        Name {
            value: LayoutName::DualChunkSwap,
            written: "dual-chunk-swap",
            also: &["thd", "thd_dual_chunk_swap"],
        },
        Name {
            value: LayoutName::Balanced,
            written: "balanced",
            also: &[],
        },
        Name {
            value: LayoutName::Identity,
            written: "identity",
            also: &[],
        },
        Name {
            value: LayoutName::Custom,
            written: "custom",
            also: &[],
        },
    ],
    unbuilt: &[],
};

fn normalised(name: &str) -> String {
    name.trim().to_lowercase().replace('-', "_")
}

impl<T: Copy> Names<T> {
    fn find(&self, given: &str) -> Result<T, String> {
        let name = normalised(given);
        let is = |written, also: &[&str]| normalised(written) == name || also.contains(&&*name);
        if DEFAULT_NAMES.contains(&&*name) {
            return Ok(self.default);
        }
        if let Some(found) = self
            .names
            .iter()
            .find(|known| is(known.written, known.also))
        {
            return Ok(found.value);
        }
        let expected = format!("expected one of {}", self.written());
        match self.unbuilt.iter().find(|one| is(one.written, one.also)) {
            Some(one) => Err(format!("{expected}; {} is not built yet", one.written)),
            None => Err(format!("{expected}; got {given:?}")),
        }
    }

    fn written(&self) -> String {
        let names: Vec<_> = self.names.iter().map(|name| name.written).collect();
        names.join(", ")
    }
}

pub(super) fn exchange<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<ExchangeStrategy, D::Error> {
    deserializer.deserialize_any(ByName(&EXCHANGES))
}

pub(super) fn primary<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<PrimaryStream, D::Error> {
    deserializer.deserialize_any(ByName(&PRIMARIES))
}

pub(super) fn layout<'de, D: Deserializer<'de>>(deserializer: D) -> Result<LayoutPolicy, D::Error> {
    deserializer.deserialize_any(ByLayout)
}

/// Reads a name, or nothing.
struct ByName<T: 'static>(&'static Names<T>);

impl<'de, T: Copy> Visitor<'de> for ByName<T> {
    type Value = T;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "one of {}", self.0.written())
    }

    fn visit_str<E: Error>(self, name: &str) -> Result<T, E> {
        self.0.find(name).map_err(E::custom)
    }

    fn visit_unit<E: Error>(self) -> Result<T, E> {
        Ok(self.0.default)
    }

    fn visit_none<E: Error>(self) -> Result<T, E> {
        Ok(self.0.default)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<T, D::Error> {
        deserializer.deserialize_any(self)
    }
}

#[derive(Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
struct Balanced {
    visibility: Visibility,
}

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Contiguous {
    multiple: usize,
}

impl Default for Contiguous {
    fn default() -> Self {
        Self { multiple: 1 }
    }
}

/// Reads the name of a layout, or its name with its values.
struct ByLayout;

impl ByLayout {
    fn named<E: Error>(name: LayoutName) -> Result<LayoutPolicy, E> {
        match name {
            LayoutName::Contiguous => Ok(DEFAULT_LAYOUT),
            LayoutName::HeadTail => Ok(LayoutPolicy::HeadTail),
            LayoutName::DualChunkSwap => Ok(LayoutPolicy::DualChunkSwap),
            LayoutName::Balanced => Ok(LayoutPolicy::Balanced {
                visibility: Visibility::default(),
            }),
            LayoutName::Identity => Ok(LayoutPolicy::Identity),
            LayoutName::Custom => Err(E::custom(
                "custom: expected the ranges of every rank, { custom = [[{ start = 0, end = 8 }, ..], ..] }, got only the name",
            )),
        }
    }
}

impl<'de> Visitor<'de> for ByLayout {
    type Value = LayoutPolicy;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "one of {}", LAYOUTS.written())
    }

    fn visit_str<E: Error>(self, name: &str) -> Result<LayoutPolicy, E> {
        Self::named(LAYOUTS.find(name).map_err(E::custom)?)
    }

    fn visit_unit<E: Error>(self) -> Result<LayoutPolicy, E> {
        Self::named(LAYOUTS.default)
    }

    fn visit_none<E: Error>(self) -> Result<LayoutPolicy, E> {
        Self::named(LAYOUTS.default)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<LayoutPolicy, D::Error> {
        deserializer.deserialize_any(self)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<LayoutPolicy, A::Error> {
        let Some(name) = map.next_key::<String>()? else {
            return Err(A::Error::custom(format_args!(
                "expected one of {}; got an empty table",
                LAYOUTS.written()
            )));
        };
        let layout = match LAYOUTS.find(&name).map_err(A::Error::custom)? {
            LayoutName::Contiguous => LayoutPolicy::Contiguous {
                multiple: map.next_value::<Contiguous>()?.multiple,
            },
            LayoutName::Balanced => LayoutPolicy::Balanced {
                visibility: map.next_value::<Balanced>()?.visibility,
            },
            LayoutName::Custom => LayoutPolicy::Custom(map.next_value::<Vec<Vec<Range<usize>>>>()?),
            name => {
                map.next_value::<()>()?;
                Self::named(name)?
            }
        };
        match map.next_key::<String>()? {
            None => Ok(layout),
            Some(second) => {
                map.next_value::<IgnoredAny>()?;
                Err(A::Error::custom(format_args!(
                    "expected one layout, got {name} and {second}"
                )))
            }
        }
    }
}

#[cfg(test)]
mod tests;
