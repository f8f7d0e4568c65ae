//! Measuring: one table of cases, operands for them, clocks, and what the adapter itself can do.
//!
//! The program (`wgpu-attention bench`), the benches (`cargo bench --bench kernels`) and a test go through the same
//! [`CASES`]. What is to be measured is first held against the [`reference`](mod@crate::reference):
//!
//! ```no_run
//! use wgpu_attention::bench::{CASES, MeasureOptions, Prepared, measure};
//! # fn main() -> wgpu_attention::Result<()> {
//! let gpu = wgpu_attention::Gpu::open_blocking(&Default::default())?;
//! let case = Prepared::new(&gpu, &CASES[0].work, &Default::default())?;
//! assert!(case.check()?.passed());
//! let measured = measure(&gpu, &MeasureOptions::default(), &mut case.recorder())?;
//! println!("{}: {:.3} ms", case.work().name(), measured.best().median * 1e3);
//! # Ok(())
//! # }
//! ```
//!
//! - `cases.rs`: what is measured, its operations and its bytes.
//! - `prepared.rs`: a case with operands on a GPU, and whether its result is right.
//! - `measure.rs`: warm-up, samples, medians; the GPU's clock and when not to believe it.
//! - `peaks.rs`: what this adapter reaches at best, by kernels of this crate, and a case's share of it.

mod cases;
mod measure;
mod peaks;
mod prepared;

pub use cases::{CASES, Case, Layout, Work, select};
pub use measure::{MeasureOptions, Measured, NoGpuTime, Recorder, Spread, Stopwatch, measure};
pub use peaks::{Bound, PEAK_KERNELS, Peak, Peaks, Share};
pub use prepared::{PrepareOptions, Prepared, noise};

use crate::Result;
use crate::replace_file::{can_write_beside, io_error, replace_file};
use std::io::Write;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// Writes a report as a whole or not at all: a reader, or an interrupted run, finds the old file or the new one.
///
/// # Errors
///
/// [`Error::Io`](crate::Error::Io) where it cannot be written, or where a file of that name is there and is not to be replaced.
pub fn save(path: &Path, text: &str, replace: bool) -> Result<()> {
    expect_writable(path, replace)?;
    replace_file(path, |file| file.write_all(text.as_bytes()))
}

/// An error where a report could not be written for a reason that can be seen before anything is measured for it.
///
/// # Errors
///
/// [`Error::Io`](crate::Error::Io) where there is no such folder or it cannot be written to, or where something of that name is there and is not to be replaced.
pub fn expect_writable(path: &Path, replace: bool) -> Result<()> {
    use std::io::{Error as IoError, ErrorKind};
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let in_folder = folder.metadata();
    in_folder.map_err(|error| io_error(folder, error))?;
    // (A link to nowhere is there, too.)
    match path.symlink_metadata() {
        Ok(_) if replace && path.metadata().is_ok_and(|there| there.is_file()) => {
            can_write_beside(path)
        }
        Ok(_) if replace => Err(io_error(
            path,
            IoError::new(ErrorKind::InvalidInput, "it is there and not a file"),
        )),
        Ok(_) => {
            let words = "it is there already";
            Err(io_error(
                path,
                IoError::new(ErrorKind::AlreadyExists, words),
            ))
        }
        Err(error) if error.kind() == ErrorKind::NotFound => can_write_beside(path),
        Err(error) => Err(io_error(path, error)),
    }
}

/// A moment as date and time of day in UTC, ISO 8601. (Before 1970 it is 1970.)
///
/// ```
/// use std::time::{Duration, UNIX_EPOCH};
///
/// let moment = UNIX_EPOCH + Duration::from_secs(1_709_210_096);
/// assert_eq!(wgpu_attention::bench::utc(moment), "2024-02-29T12:34:56Z");
/// ```
pub fn utc(moment: SystemTime) -> String {
    let seconds = moment
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs());
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // Counted from 1 March of the year 0, so that a leap day is the last of its year: 400 years are 146,097 days.
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    // Months of 31, 30, 31, 30, 31 days, again and again.
    let month = (5 * day + 2) / 153;
    let date = day - (153 * month + 2) / 5 + 1;
    let (year, month) = match month {
        0..10 => (year, month + 3),
        _ => (year + 1, month - 9),
    };
    format!(
        "{:04}-{month:02}-{date:02}T{:02}:{:02}:{:02}Z",
        era * 400 + year,
        rest / 3600,
        rest / 60 % 60,
        rest % 60
    )
}
