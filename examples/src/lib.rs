//! stub
pub mod data;
pub mod models;
