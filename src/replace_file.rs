//! Files that are replaced as a whole or not at all.

use crate::{Error, Result};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

/// Writes a file beside `path` and puts it in its place: whoever reads finds the old one or the new one, whatever happens meanwhile. What is
/// there and not a file stays.
///
/// # Errors
///
/// [`Error::Io`]; what was there is as it was.
pub(crate) fn replace_file(
    path: &Path,
    write: impl FnOnce(&mut File) -> io::Result<()>,
) -> Result<()> {
    // What is there is replaced by its own name, not a link to it, and only if it is a file.
    let existing = fs::metadata(path).ok();
    let resolved = match &existing {
        Some(_) => fs::canonicalize(path).map_err(|error| io_error(path, error))?,
        None => path.to_path_buf(),
    };
    if existing
        .as_ref()
        .is_some_and(|existing| !existing.is_file())
    {
        let error = io::Error::new(io::ErrorKind::InvalidInput, "it is there and not a file");
        return Err(io_error(path, error));
    }
    let path = resolved.as_path();
    let Some(name) = path.file_name() else {
        let error = io::Error::new(io::ErrorKind::InvalidInput, "not the name of a file");
        return Err(io_error(path, error));
    };
    let (mut file, temporary) = create_beside(path, &name.to_string_lossy())?;
    let written = write(&mut file)
        .and_then(|()| match &existing {
            Some(existing) => file.set_permissions(existing.permissions()),
            None => Ok(()),
        })
        .and_then(|()| file.sync_all())
        .and_then(|()| fs::rename(&temporary, path));
    written.map_err(|error| {
        // Whatever is left of it is of no use; that it cannot be removed either adds nothing to the error.
        let _ = fs::remove_file(&temporary);
        io_error(path, error)
    })
}

/// An error where no file could be written beside `path`: a folder that cannot be written to, a file system that is read only.
pub(crate) fn can_write_beside(path: &Path) -> Result<()> {
    let name = path.file_name().unwrap_or_default();
    let (_, temporary) = create_beside(path, &name.to_string_lossy())?;
    fs::remove_file(&temporary).map_err(|error| io_error(path, error))
}

/// A new file in the folder of `path`, under a name that nobody has and that does not end as a tensor file's.
fn create_beside(path: &Path, name: &str) -> Result<(File, PathBuf)> {
    // (A name may be as long as a name can be.)
    let name: String = name.chars().take(40).collect();
    for attempt in 0..1000 {
        let temporary = path.with_file_name(format!(".{name}.{attempt}.tmp"));
        match File::create_new(&temporary) {
            Ok(file) => return Ok((file, temporary)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(io_error(path, error)),
        }
    }
    let error = io::Error::new(
        io::ErrorKind::AlreadyExists,
        format!("the folder holds 1000 leftovers named .{name}.*.tmp; remove them"),
    );
    Err(io_error(path, error))
}

/// A file that could not be read or written.
pub(crate) fn io_error(path: &Path, source: io::Error) -> Error {
    Error::Io {
        path: path.display().to_string(),
        source,
    }
}
