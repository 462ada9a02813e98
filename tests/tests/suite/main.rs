//! Collectives, attention and steps across ranks in threads.

mod attention;
mod bad_input;
mod bitwise;
mod collectives;
mod operations;
mod order;
mod steps;
mod training_math;
mod unpacked_reference;
