//! Conversations, checked before training starts, and their packing into rows.
//!
//! A document's pictures are decoded once to learn its length and to find mistakes, and again when its row is trained on, so that no
//! more than a row's patches are held.

use std::{
    fs,
    path::{Path, PathBuf},
};

use rand::{SeedableRng, rngs::StdRng, seq::SliceRandom};
use serde::Deserialize;

use super::LongDocuments;
use crate::{
    data::{Document, IGNORED_LABEL, Marks, Pack},
    hf::{Message, ModelDirectory, Processor, PromptError},
};

/// Documents that are packed together; within them the longest come first.
const WINDOW: usize = 256;
/// Rows are as long as their documents, rounded up to this, so that few shapes occur.
const ROUNDING: usize = 16;

/// What is wrong with one line.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LineError {
    /// It is no conversation.
    #[error("{}", .0.to_string().replace(" at line 1 column", " at column"))]
    Json(serde_json::Error),
    /// Its messages cannot be turned into a document.
    #[error(transparent)]
    Prompt(#[from] PromptError),
    /// Nothing is to be learned from it.
    #[error("expected a turn of the assistant with words, got none")]
    NoAnswer,
    /// Nothing of it is trained.
    #[error("expected an image or a video, since the decoder is frozen, got none")]
    NoMedia,
    /// It is longer than a row.
    #[error("expected at most {expected} tokens, got {got}")]
    TooLong {
        /// Tokens of a row.
        expected: usize,
        /// Its tokens.
        got: usize,
    },
}

/// Conversations that cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CorpusError {
    /// The file cannot be read.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: String,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A line is wrong.
    #[error("{path}, line {line}: {source}")]
    Line {
        /// The file.
        path: String,
        /// Number of the line, from 1.
        line: usize,
        /// What is wrong.
        source: LineError,
    },
    /// No document is left.
    #[error("{path}: no document to train on ({dropped} were longer than a row)")]
    Empty {
        /// The file.
        path: String,
        /// Documents left out.
        dropped: usize,
    },
}

#[derive(Deserialize)]
struct Line {
    messages: Vec<Message>,
}

struct Entry {
    messages: Vec<Message>,
    len: usize,
}

/// The documents of a run.
pub struct Corpus {
    base: PathBuf,
    processor: Processor,
    marks: Marks,
    entries: Vec<Entry>,
    tokens: usize,
    dropped: usize,
}

impl Corpus {
    /// Reads a file of conversations, `{"messages": [..]}` one a line, and checks every one of them, pictures included.
    /// `needs_media`: whether each must have a picture or video.
    ///
    /// # Errors
    /// The first line that is wrong; no document at all.
    pub fn read(
        path: &Path,
        directory: &ModelDirectory,
        tokens: usize,
        long: LongDocuments,
        needs_media: bool,
    ) -> Result<Self, CorpusError> {
        let shown = path.display().to_string();
        let text = fs::read_to_string(path).map_err(|source| CorpusError::Io {
            path: shown.clone(),
            source,
        })?;
        let config = directory.config();
        let processor = directory.processor().clone();
        let marks = Marks {
            padding: processor.padding_id(),
            image: config.image_token_id,
            video: config.video_token_id,
        };
        let mut corpus = Self {
            base: path.parent().map(Path::to_owned).unwrap_or_default(),
            processor,
            marks,
            entries: Vec::new(),
            tokens,
            dropped: 0,
        };
        for (index, line) in text.lines().enumerate() {
            if line.trim().is_empty() {
                continue;
            }
            match corpus.entry(line, needs_media) {
                Ok(entry) => corpus.entries.push(entry),
                Err(LineError::TooLong { .. }) if long == LongDocuments::Drop => {
                    corpus.dropped += 1;
                }
                Err(source) => {
                    return Err(CorpusError::Line {
                        path: shown,
                        line: index + 1,
                        source,
                    });
                }
            }
        }
        if corpus.entries.is_empty() {
            return Err(CorpusError::Empty {
                path: shown,
                dropped: corpus.dropped,
            });
        }
        Ok(corpus)
    }

    fn entry(&self, line: &str, needs_media: bool) -> Result<Entry, LineError> {
        let line: Line = serde_json::from_str(line).map_err(LineError::Json)?;
        let document = self.document(&line.messages)?;
        if document.labels.iter().all(|&label| label == IGNORED_LABEL) {
            return Err(LineError::NoAnswer);
        }
        if needs_media && document.media.is_empty() {
            return Err(LineError::NoMedia);
        }
        if document.len() > self.tokens {
            return Err(LineError::TooLong {
                expected: self.tokens,
                got: document.len(),
            });
        }
        Ok(Entry {
            len: document.len(),
            messages: line.messages,
        })
    }

    fn document(&self, messages: &[Message]) -> Result<Document, PromptError> {
        self.processor.document(messages, &self.base, false)
    }

    /// Number of documents.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there is none; never so.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Documents that were longer than a row and left out.
    pub fn num_dropped(&self) -> usize {
        self.dropped
    }

    /// How messages become tokens.
    pub fn processor(&self) -> &Processor {
        &self.processor
    }

    /// The rows of one pass over all documents, each a list of documents. Depends on the seed and the epoch alone.
    ///
    /// Documents are shuffled; within windows the longest come first, and each goes into the first row that has room
    /// (first-fit decreasing: Johnson, 1973). Rows are shuffled again.
    #[must_use]
    pub fn rows(&self, seed: u64, epoch: u64) -> Vec<Vec<usize>> {
        let mut rng = StdRng::seed_from_u64(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ epoch);
        let mut order: Vec<usize> = (0..self.entries.len()).collect();
        order.shuffle(&mut rng);
        let mut rows: Vec<Vec<usize>> = Vec::new();
        for window in order.chunks_mut(WINDOW) {
            window.sort_by_key(|&at| std::cmp::Reverse(self.entries[at].len));
            let mut open: Vec<(usize, Vec<usize>)> = Vec::new();
            for &mut at in window {
                let len = self.entries[at].len;
                match open.iter_mut().find(|(left, _)| *left >= len) {
                    Some((left, row)) => {
                        *left -= len;
                        row.push(at);
                    }
                    None => open.push((self.tokens - len, vec![at])),
                }
            }
            rows.extend(open.into_iter().map(|(_, row)| row));
        }
        rows.shuffle(&mut rng);
        rows
    }

    /// The row of these documents, decoded.
    ///
    /// # Errors
    /// A picture that could be used when the run began cannot any more.
    pub fn pack(&self, row: &[usize]) -> Result<Pack, PromptError> {
        let documents = row
            .iter()
            .map(|&at| self.document(&self.entries[at].messages))
            .collect::<Result<Vec<_>, _>>()?;
        let used: usize = documents.iter().map(Document::len).sum();
        let tokens = used.next_multiple_of(ROUNDING).min(self.tokens);
        Ok(Pack::from_documents(
            documents,
            tokens.max(used),
            self.marks,
        ))
    }
}
