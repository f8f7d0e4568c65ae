//! Files of results: what `wgpu-attention bench` found, kept, compared and drawn.
//!
//! ```no_run
//! use wgpu_attention::results::{ResultFile, labelled};
//! # fn main() -> wgpu_attention::Result<()> {
//! let files = [
//!     ("before".to_string(), ResultFile::load("before.json")?),
//!     ("after".to_string(), ResultFile::load("after.json")?),
//! ];
//! for run in labelled(&files) {
//!     println!("{}: {} cases", run.label, run.run.cases.len());
//! }
//! # Ok(())
//! # }
//! ```
//!
//! - `file.rs`: the schema, reading (a file is somebody else's bytes) and writing.
//! - `report/`: one HTML page of them, with charts.

mod file;
mod report;

pub use file::{
    Adapter, CaseResult, Clock, LabelledRun, Limits, MeasuredCase, MeasuredPeaks, Outcome,
    PeakForm, ResultFile, Run, SCHEMA, Settings, System, Times, labelled,
};
pub use report::{report, report_charts};
