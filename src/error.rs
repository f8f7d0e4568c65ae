//! The one error type of this crate, and the sentences it says.
//!
//! Every message says what was wrong, what was expected, what was there, and what to do.

use std::fmt;

/// What this crate's functions return.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong.
///
/// Match on it: new variants may come, the fields of the present ones stay.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// This machine has no adapter at all.
    #[error("no GPU adapter was found. {remedy}")]
    NoAdapter {
        /// What to install.
        remedy: String,
    },

    /// No adapter is the one that was asked for, by name or by backend.
    #[error("no adapter is {wanted}; there is {available}")]
    AdapterNotFound {
        /// What was asked for, and where.
        wanted: String,
        /// What there is instead, or what to install.
        available: String,
    },

    /// The adapter was found, but refused to give a device.
    #[error("adapter {adapter:?} refused to open a device: {message}")]
    DeviceRefused {
        /// The adapter's name.
        adapter: String,
        /// wgpu's words.
        message: String,
    },

    /// The adapter lacks a feature that this request cannot do without.
    #[error(
        "{what} needs {feature}, which adapter {adapter:?} does not have or its device was opened without"
    )]
    MissingFeature {
        /// What was asked for.
        what: String,
        /// The feature's name.
        feature: String,
        /// The adapter's name.
        adapter: String,
    },

    /// Something that the caller made has no room left. Nothing was recorded, and it is as it was.
    #[error("{what} needs room for {needed} {unit}, and there is room for {available}; {remedy}")]
    NoRoom {
        /// What was to go where.
        what: String,
        /// How much was needed.
        needed: u64,
        /// How much there is.
        available: u64,
        /// What they count.
        unit: &'static str,
        /// What to do.
        remedy: &'static str,
    },

    /// The request is sound but larger than this device or this crate allows. Nothing was allocated.
    #[error(
        "{what} needs {needed} {unit}, but {limit} allows {available}; make the problem smaller, or open the device with a higher limit if the adapter has one"
    )]
    LimitExceeded {
        /// What was asked for.
        what: String,
        /// The limit's name, as wgpu spells it where it is one of wgpu's.
        limit: String,
        /// How much was needed.
        needed: u64,
        /// How much there is.
        available: u64,
        /// Bytes, elements, workgroups, and so on.
        unit: &'static str,
    },

    /// A shape, length or size is not what the other arguments call for.
    #[error("{argument}: expected {expected}, got {got}")]
    Shape {
        /// The argument's name.
        argument: String,
        /// What the other arguments call for.
        expected: String,
        /// What came.
        got: String,
    },

    /// A tensor holds another element type than the operation takes.
    #[error("{argument}: expected element type {expected}, got {got}")]
    Type {
        /// The argument's name.
        argument: String,
        /// The type the operation takes.
        expected: String,
        /// The type that came.
        got: String,
    },

    /// A parameter is outside what it may be.
    #[error("{parameter} = {value}: {rule}")]
    Parameter {
        /// The parameter's name.
        parameter: &'static str,
        /// Its value.
        value: String,
        /// The rule it breaks.
        rule: String,
    },

    /// A view cannot be bound as it lies.
    #[error("{argument}: {problem}; {remedy}")]
    Layout {
        /// The argument's name.
        argument: String,
        /// What is in the way.
        problem: String,
        /// What to do.
        remedy: String,
    },

    /// A tensor belongs to another [`Gpu`](crate::Gpu) than the operation.
    #[error(
        "{argument}: this tensor was made on another Gpu (adapter {theirs:?}) than the operation (adapter {ours:?}); upload it there first"
    )]
    OtherDevice {
        /// The argument's name.
        argument: String,
        /// The adapter that the operation runs on.
        ours: String,
        /// The adapter that the tensor lives on.
        theirs: String,
    },

    /// The device has no memory left for this.
    #[error("out of GPU memory: {what} of {bytes} bytes")]
    OutOfMemory {
        /// What was to be allocated.
        what: String,
        /// How much of it.
        bytes: u64,
    },

    /// The device is gone: open a new [`Gpu`](crate::Gpu) and upload again.
    #[error("the GPU device was lost: {reason}; open it again")]
    DeviceLost {
        /// The driver's words.
        reason: String,
    },

    /// A shader was refused by naga or by the driver.
    #[error("shader {kernel} was refused: {message}")]
    Shader {
        /// The kernel's name.
        kernel: String,
        /// naga's or the driver's words, with the line where they name one.
        message: String,
    },

    /// wgpu refused something that this crate thought was sound, or that a caller's own buffer made unsound.
    #[error("wgpu refused {what}: {message}")]
    Validation {
        /// What was being done.
        what: String,
        /// wgpu's words.
        message: String,
    },

    /// A file could not be read or written.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: String,
        /// The operating system's words.
        source: std::io::Error,
    },

    /// A file was read but does not hold what it should.
    #[error("{path}: {problem}")]
    Format {
        /// The file.
        path: String,
        /// What is wrong with it, what was expected and what was there.
        problem: String,
    },

    /// Sound, but not built yet (or not for this element type): said, never approximated.
    #[error("{what} is not supported: {reason}")]
    Unsupported {
        /// What was asked for.
        what: String,
        /// Why not, and what to use instead.
        reason: String,
    },
}

impl Error {
    /// A shape mismatch, from anything that can be displayed.
    pub(crate) fn shape(
        argument: impl Into<String>,
        expected: impl fmt::Display,
        got: impl fmt::Display,
    ) -> Self {
        Error::Shape {
            argument: argument.into(),
            expected: expected.to_string(),
            got: got.to_string(),
        }
    }

    /// A parameter that breaks a rule.
    pub(crate) fn parameter(
        parameter: &'static str,
        value: impl fmt::Display,
        rule: impl Into<String>,
    ) -> Self {
        Error::Parameter {
            parameter,
            value: value.to_string(),
            rule: rule.into(),
        }
    }

    /// A limit in bytes.
    pub(crate) fn limit_bytes(
        what: impl Into<String>,
        limit: impl Into<String>,
        needed: u64,
        available: u64,
    ) -> Self {
        Error::LimitExceeded {
            what: what.into(),
            limit: limit.into(),
            needed,
            available,
            unit: "bytes",
        }
    }
}
