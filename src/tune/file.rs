//! Winners in a file: JSON, a list of devices with the problems that were tuned on each.
//!
//! ```json
//! {
//!   "format": "wgpu-attention tuning",
//!   "version": 1,
//!   "devices": [{
//!     "adapter": "AMD Radeon RX 6800 (RADV NAVI21)",
//!     "driver": "radv",
//!     "driver_info": "Mesa 25.0.7",
//!     "backend": "vulkan",
//!     "crate": "0.1.0",
//!     "kernels": "0123456789abcdef",
//!     "winners": [{
//!       "problem": "linear 1024 rows, 768 to 2304",
//!       "kernel": "linear_tiled",
//!       "tier": "Plain",
//!       "constants": [["ROWS", 8], ["COLUMNS", 8]],
//!       "splits": 1,
//!       "seconds": 0.0004,
//!       "planned_seconds": 0.0005
//!     }]
//!   }]
//! }
//! ```

use crate::gpu::{Gpu, Winner};
use crate::kernels::hash_of_all;
use crate::replace_file::{io_error, replace_file};
use crate::{Error, Result};
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;

const FORMAT: &str = "wgpu-attention tuning";
const VERSION: u64 = 1;

/// The longest file that is read, in bytes; a winner takes about 300.
const MOST_BYTES: u64 = 64 << 20;

/// What a device's entry is found by.
const DEVICE_KEYS: [&str; 4] = ["adapter", "driver", "driver_info", "backend"];

impl Gpu {
    /// Writes what tuning found on this device to a file, beside what the file holds of other devices, and of this one by the same
    /// driver and kernels. All of it or nothing; of two programs that do so at once one loses what it found.
    ///
    /// # Errors
    ///
    /// [`Error::Format`] if the file is there and holds something else: it is left as it is. [`Error::Io`].
    pub fn save_tuning(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let mut devices = match read(path)? {
            None => Vec::new(),
            Some(text) => devices_of(&text).map_err(|problem| Error::Format {
                path: path.display().to_string(),
                problem: format!("{problem}; it is left as it is: remove it, or name another"),
            })?,
        };
        let own = self.device_entry();
        let mut winners = HashMap::new();
        devices.retain(|device| {
            let same = DEVICE_KEYS
                .iter()
                .all(|key| device.get(*key) == own.get(*key));
            // Of other kernels, or an older version of this crate, nothing holds any more.
            if same && is_current(device, &own) {
                winners.extend(winners_of(device));
            }
            !same
        });
        winners.extend(self.tuning().clone());
        let mut winners: Vec<_> = winners.into_iter().collect();
        winners.sort_by(|a, b| a.0.cmp(&b.0));
        let mut device = own;
        let winners = winners
            .iter()
            .map(|(problem, winner)| entry(problem, winner));
        device.insert("winners".into(), winners.collect());
        devices.push(device);
        let all = json!({ "format": FORMAT, "version": VERSION, "devices": devices });
        replace_file(path, |file| {
            serde_json::to_writer_pretty(&mut *file, &all)?;
            file.write_all(b"\n")
        })
    }

    /// Whether [`save_tuning`](Self::save_tuning) could add to a file, as far as that shows without writing: it is not there, in a folder that is, or a
    /// sound tuning file.
    ///
    /// # Errors
    ///
    /// [`Error::Format`] if it is there and holds something else, [`Error::Io`] if it is no file or cannot be read, or its folder is not there.
    pub fn check_tuning(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        if let Some(text) = read(path)? {
            return devices_of(&text)
                .map(drop)
                .map_err(|problem| Error::Format {
                    path: path.display().to_string(),
                    problem: format!("{problem}; it is left as it is: remove it, or name another"),
                });
        }
        let folder = match path.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            _ => Path::new("."),
        };
        let folder = folder.metadata().map_err(|error| io_error(path, error))?;
        match folder.is_dir() && !folder.permissions().readonly() {
            true => Ok(()),
            false => Err(io_error(path, io::ErrorKind::PermissionDenied.into())),
        }
    }

    /// Takes what a file of [`save_tuning`](Self::save_tuning) holds of this device, and returns how many problems that are; what was tuned
    /// on this `Gpu` itself stays. A file that is not there, is damaged, or holds nothing of this adapter by this driver, version and kernels
    /// counts as empty, which is logged as a warning (but where it is not there).
    ///
    /// # Errors
    ///
    /// [`Error::Io`] for one that is there and cannot be read.
    pub fn load_tuning(&self, path: impl AsRef<Path>) -> Result<usize> {
        let path = path.as_ref();
        let ignored = |why: &str| log::warn!("{}: ignored: {why}", path.display());
        let Some(text) = read(path)? else {
            return Ok(0);
        };
        let devices = match devices_of(&text) {
            Ok(devices) => devices,
            Err(problem) => {
                ignored(&problem);
                return Ok(0);
            }
        };
        let own = self.device_entry();
        let same = |device: &&Map<String, Value>| {
            DEVICE_KEYS
                .iter()
                .all(|key| device.get(*key) == own.get(*key))
        };
        let Some(device) = devices.iter().find(same) else {
            ignored("it holds nothing of this adapter with this driver");
            return Ok(0);
        };
        if !is_current(device, &own) {
            ignored("it was made with another version of the kernels; tune again");
            return Ok(0);
        }
        let winners = winners_of(device);
        let count = winners.len();
        let mut tuning = self.tuning();
        for (problem, winner) in winners {
            tuning.entry(problem).or_insert(winner);
        }
        Ok(count)
    }

    /// What its entry is found by, and whether it still holds.
    fn device_entry(&self) -> Map<String, Value> {
        let info = self.adapter_info();
        let own = json!({
            "adapter": info.name,
            "driver": info.driver,
            "driver_info": info.driver_info,
            "backend": info.backend.to_str(),
            "crate": env!("CARGO_PKG_VERSION"),
            "kernels": hash_of_all(),
        });
        match own {
            Value::Object(own) => own,
            _ => Map::new(),
        }
    }
}

/// The text of a file; `None` where there is none.
fn read(path: &Path) -> Result<Option<String>> {
    let mut bytes = Vec::new();
    // (To open a pipe would wait for whoever writes to it.)
    if path.metadata().is_ok_and(|there| !there.is_file()) {
        return Err(io_error(
            path,
            io::Error::new(io::ErrorKind::InvalidInput, "it is there and not a file"),
        ));
    }
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(io_error(path, error)),
    };
    let read = file.take(MOST_BYTES + 1).read_to_end(&mut bytes);
    read.map_err(|error| io_error(path, error))?;
    Ok(Some(String::from_utf8_lossy(&bytes).into_owned()))
}

/// The devices of a file, or what is wrong with it.
fn devices_of(text: &str) -> std::result::Result<Vec<Map<String, Value>>, String> {
    if text.len() as u64 > MOST_BYTES {
        return Err(format!("it is longer than {MOST_BYTES} bytes"));
    }
    let value: Value =
        serde_json::from_str(text).map_err(|error| format!("it is not JSON ({error})"))?;
    if value["format"] != FORMAT {
        return Err(format!(
            "it is no tuning file (its \"format\" is not \"{FORMAT}\")"
        ));
    }
    if value["version"] != VERSION {
        return Err(format!(
            "its version is {}, and {VERSION} is understood",
            value["version"]
        ));
    }
    let devices = value["devices"]
        .as_array()
        .ok_or("its \"devices\" are no list")?;
    let devices = devices.iter().map(|device| device.as_object().cloned());
    devices
        .collect::<Option<Vec<_>>>()
        .ok_or_else(|| "one of its \"devices\" is no object".into())
}

/// Whether a device's entry was made by these kernels.
fn is_current(device: &Map<String, Value>, own: &Map<String, Value>) -> bool {
    ["crate", "kernels"]
        .iter()
        .all(|key| device.get(*key) == own.get(*key))
}

/// The winners of a device's entry. One that is damaged is left out: it is a hint, and what it names is looked up among the
/// candidates before it is taken.
fn winners_of(device: &Map<String, Value>) -> Vec<(String, Winner)> {
    let winners = device.get("winners").and_then(Value::as_array);
    let number = |value: &Value| u32::try_from(value.as_u64()?).ok();
    let seconds = |value: &Value| value.as_f64().filter(|seconds| *seconds >= 0.0);
    let winner = |value: &Value| {
        let constants = value["constants"]
            .as_array()?
            .iter()
            .map(|constant| Some((constant[0].as_str()?.to_string(), number(&constant[1])?)));
        let winner = Winner {
            kernel: value["kernel"].as_str()?.to_string(),
            tier: value["tier"].as_str()?.to_string(),
            constants: constants.collect::<Option<_>>()?,
            splits: number(&value["splits"])?,
            seconds: seconds(&value["seconds"])?,
            planned_seconds: seconds(&value["planned_seconds"])?,
        };
        Some((value["problem"].as_str()?.to_string(), winner))
    };
    let found: Vec<_> = winners.into_iter().flatten().map(winner).collect();
    let damaged = found.iter().filter(|winner| winner.is_none()).count();
    if damaged > 0 {
        log::warn!("{damaged} entries of the tuning file are damaged and ignored");
    }
    found.into_iter().flatten().collect()
}

fn entry(problem: &str, winner: &Winner) -> Value {
    json!({
        "problem": problem,
        "kernel": winner.kernel,
        "tier": winner.tier,
        "constants": winner.constants,
        "splits": winner.splits,
        "seconds": winner.seconds,
        "planned_seconds": winner.planned_seconds,
    })
}
