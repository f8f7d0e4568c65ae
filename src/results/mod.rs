//! Files of results: what `wgpu-attention bench` found, kept, compared and drawn.
//!
//! ```no_run
//! use wgpu_attention::results::{Comparison, ResultFile, labelled};
//! # fn main() -> wgpu_attention::Result<()> {
//! let files = [
//!     ("before".to_string(), ResultFile::load("before.json")?),
//!     ("after".to_string(), ResultFile::load("after.json")?),
//! ];
//! for case in &Comparison::of(&labelled(&files))?.cases {
//!     if let Some(change) = case.against_first(1) {
//!         println!("{}: {:.2} times as long: {}", case.id, change.ratio, change.verdict);
//!     }
//! }
//! # Ok(())
//! # }
//! ```
//!
//! - `file.rs`: the schema, reading (a file is somebody else's bytes) and writing.
//! - `compare.rs`: runs beside each other, and what is only noise.
//! - `report/`: one HTML page of them, with charts.

mod compare;
mod file;
mod report;

pub use compare::{Change, ComparedCase, Comparison, FLOOR, Verdict, change_of};
pub use file::{
    Adapter, CaseResult, Clock, LabelledRun, Limits, MeasuredCase, MeasuredPeaks, Outcome,
    PeakForm, ResultFile, Run, SCHEMA, Settings, System, Times, labelled,
};
pub use report::{report, report_charts, visible};
