//! Clocks: warm-up, samples, medians; GPU time where the adapter has it and it can be believed, wall time always.
//!
//! A sample is one submission of as many calls as make it long enough for a clock. Wall time is that of encoding, submitting
//! and waiting; GPU time, from submissions of their own, is the sum of what the timestamps around each pass say.

use crate::gpu::{Gpu, Timestamps};
use crate::{Error, Result};
use std::fmt;
use std::time::{Duration, Instant};

/// Records one call into an encoder, with timestamps around its passes where they are given.
pub type Recorder<'a> =
    dyn FnMut(&mut wgpu::CommandEncoder, Option<&mut Timestamps>) -> Result<()> + 'a;

/// How long and how often. Plain data: start from the default and change fields.
#[derive(Clone, Debug, PartialEq)]
pub struct MeasureOptions {
    /// Samples at most.
    pub samples: usize,
    /// After this long there are no more samples, once there are three.
    pub budget: Duration,
    /// Warming up ends when two samples in a row agree within a twentieth, or after this long.
    pub warm_up: Duration,
    /// What a sample lasts at least; calls are repeated for it.
    pub sample: Duration,
}

impl Default for MeasureOptions {
    fn default() -> Self {
        MeasureOptions {
            samples: 30,
            budget: Duration::from_secs(2),
            warm_up: Duration::from_millis(300),
            sample: Duration::from_millis(10),
        }
    }
}

/// Samples of a measurement at least, however long they take.
const FEWEST_SAMPLES: usize = 3;

/// Calls of a sample at most.
const MOST_CALLS: u32 = 256;

/// Passes that are timed in one submission at most.
const MOST_PASSES: u32 = 2048;

/// A median and how far the samples lie from it, in seconds a call.
#[derive(Clone, Debug, PartialEq)]
pub struct Spread {
    /// The middle sample.
    pub median: f64,
    /// A tenth of the samples lies below.
    pub p10: f64,
    /// A tenth of the samples lies above.
    pub p90: f64,
    /// All of them in the order in which they were taken.
    pub samples: Vec<f64>,
}

impl Spread {
    /// Of that many seconds each; `None` where there is no sample or one is not a number.
    pub fn of(samples: Vec<f64>) -> Option<Self> {
        if samples.iter().any(|seconds| !seconds.is_finite()) {
            return None;
        }
        let mut sorted = samples.clone();
        sorted.sort_by(f64::total_cmp);
        let last = sorted.len().checked_sub(1)?;
        let at = |share: f64| sorted[(share * last as f64).round() as usize];
        Some(Spread {
            median: at(0.5),
            p10: at(0.1),
            p90: at(0.9),
            samples,
        })
    }

    /// From a tenth to nine tenths of the samples, as a share of the median.
    pub fn relative(&self) -> f64 {
        (self.p90 - self.p10) / self.median.max(f64::MIN_POSITIVE)
    }
}

/// Why there is no GPU time.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum NoGpuTime {
    /// The device has no timestamps.
    NoTimestamps,
    /// Passes that take time took none by the GPU's clock.
    Zero,
    /// The GPU's clock ran backwards over a pass.
    Backwards,
    /// The GPU's clock moves in steps of more than a twentieth of a call.
    Coarse {
        /// Seconds of a step.
        step: f64,
    },
    /// Passes took longer by the GPU's clock than their whole submission took by the wall's.
    Long {
        /// How many times as long.
        times: f64,
    },
}

impl fmt::Display for NoGpuTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NoGpuTime::NoTimestamps => write!(f, "the device has no timestamps"),
            NoGpuTime::Zero => write!(f, "the GPU's timestamps do not move"),
            NoGpuTime::Backwards => write!(f, "the GPU's clock ran backwards"),
            NoGpuTime::Coarse { step } => write!(
                f,
                "the GPU's clock moves in steps of {:.1} microseconds, which is coarse beside a call",
                step * 1e6
            ),
            NoGpuTime::Long { times } => write!(
                f,
                "by the GPU's clock passes took {times:.1} times as long as their submission by the wall's"
            ),
        }
    }
}

/// What was measured, in seconds a call.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Measured {
    /// Encoding, submitting and waiting.
    pub wall: Spread,
    /// The passes by the GPU's clock, or why not.
    pub gpu: Result<Spread, NoGpuTime>,
    /// Calls of a sample of wall time.
    pub calls: u32,
}

impl Measured {
    /// GPU time where there is one, else wall time.
    pub fn best(&self) -> &Spread {
        self.gpu.as_ref().unwrap_or(&self.wall)
    }
}

/// A submission by the GPU's clock.
#[derive(Clone, Debug)]
struct Timed {
    /// Seconds of the passes of each call.
    calls: Vec<f64>,
    /// Seconds of the submission by the wall's clock.
    wall: f64,
}

/// Measures what `record` records: warms up, finds out how many calls make a sample, and takes samples by the wall's clock and
/// by the GPU's, turn and turn about.
///
/// # Errors
///
/// What recording gives; [`Error::DeviceLost`].
pub fn measure(gpu: &Gpu, options: &MeasureOptions, record: &mut Recorder<'_>) -> Result<Measured> {
    let mut watch = Stopwatch::new(gpu)?;
    let calls = watch.warm_up(options, record)?;
    // (What the first one is for: how many passes a call has.)
    watch.timed(1, record)?;
    let (mut walls, mut timed) = (Vec::new(), Vec::new());
    let begin = Instant::now();
    while walls.len() < options.samples.max(1) {
        if walls.len() >= FEWEST_SAMPLES && begin.elapsed() > options.budget {
            break;
        }
        walls.push(watch.wall(calls, record)? / f64::from(calls));
        timed.extend(watch.timed(calls, record)?);
    }
    let wall = Spread::of(walls).ok_or_else(|| Error::Unsupported {
        what: "measuring".into(),
        reason: "the clock of this machine gives no numbers".into(),
    })?;
    Ok(Measured {
        gpu: match watch.broken {
            Some(reason) => Err(reason),
            None => judge(&timed),
        },
        wall,
        calls,
    })
}

/// Seconds a call by the GPU's clock of each submission, if they can be believed.
fn judge(timed: &[Timed]) -> Result<Spread, NoGpuTime> {
    let calls: Vec<f64> = timed.iter().flat_map(|own| own.calls.clone()).collect();
    if calls.iter().any(|seconds| *seconds <= 0.0) {
        return Err(NoGpuTime::Zero);
    }
    let sums: Vec<(f64, &Timed)> = timed
        .iter()
        .map(|own| (own.calls.iter().sum(), own))
        .collect();
    // (The two clocks may differ by some hundredths.)
    let longest = sums
        .iter()
        .map(|(sum, own)| sum / own.wall.max(1e-9))
        .fold(0.0, f64::max);
    if longest > 1.1 {
        return Err(NoGpuTime::Long { times: longest });
    }
    let spread = sums
        .iter()
        .map(|(sum, own)| sum / own.calls.len().max(1) as f64)
        .collect();
    let Some(spread) = Spread::of(spread) else {
        return Err(NoGpuTime::Zero);
    };
    // All of them are multiples of the clock's step.
    let step = calls.iter().fold(0, |step, seconds| {
        greatest_common_divisor(step, (seconds * 1e9).round() as u64)
    });
    let step = step as f64 * 1e-9;
    match calls.len() > 1 && step > spread.median / 20.0 {
        true => Err(NoGpuTime::Coarse { step }),
        false => Ok(spread),
    }
}

fn greatest_common_divisor(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

/// Both clocks of a device.
#[derive(Debug)]
pub struct Stopwatch {
    gpu: Gpu,
    timestamps: Option<Timestamps>,
    /// Passes of a call, once one was timed.
    passes: Option<u32>,
    broken: Option<NoGpuTime>,
}

impl Stopwatch {
    /// For one kind of call.
    ///
    /// # Errors
    ///
    /// As [`Timestamps::new`], where the device has them.
    pub fn new(gpu: &Gpu) -> Result<Self> {
        let has = gpu.capabilities().timestamps;
        let timestamps = has.then(|| Timestamps::new(gpu, MOST_PASSES));
        Ok(Stopwatch {
            gpu: gpu.clone(),
            timestamps: timestamps.transpose()?,
            passes: None,
            broken: (!has).then_some(NoGpuTime::NoTimestamps),
        })
    }

    /// Seconds that one submission of `calls` calls takes: encoding, submitting and waiting.
    ///
    /// # Errors
    ///
    /// What recording gives; [`Error::DeviceLost`].
    pub fn wall(&self, calls: u32, record: &mut Recorder<'_>) -> Result<f64> {
        let begin = Instant::now();
        let submission = self.gpu.record_and_submit(|encoder| {
            for _ in 0..calls {
                record(encoder, None)?;
            }
            Ok(())
        })?;
        self.gpu.wait_for(submission)?;
        Ok(begin.elapsed().as_secs_f64())
    }

    /// Seconds of the passes of one call by the GPU's clock; `None` where there is no clock, it ran backwards, or the call has no
    /// pass. Whether it can be believed otherwise is for [`measure`] to say.
    ///
    /// # Errors
    ///
    /// What recording gives; [`Error::DeviceLost`].
    pub fn gpu(&mut self, record: &mut Recorder<'_>) -> Result<Option<f64>> {
        let timed = self.timed(1, record)?;
        Ok(timed.map(|timed| timed.calls.iter().sum()))
    }

    /// Repeats calls until they settle, and returns how many make a sample.
    fn warm_up(&self, options: &MeasureOptions, record: &mut Recorder<'_>) -> Result<u32> {
        let begin = Instant::now();
        let mut calls = 1;
        let mut before = self.wall(calls, record)?;
        loop {
            let seconds = self.wall(calls, record)?;
            let wanted = options.sample.as_secs_f64() / (seconds / f64::from(calls)).max(1e-9);
            if wanted > f64::from(calls) && calls < MOST_CALLS {
                calls = (wanted.ceil() as u32).clamp(calls + 1, (calls * 8).min(MOST_CALLS));
                before = f64::INFINITY;
            } else if (seconds - before).abs() <= 0.05 * seconds
                || begin.elapsed() > options.warm_up
            {
                return Ok(calls);
            } else {
                before = seconds;
            }
        }
    }

    /// A submission of at most `calls` calls by the GPU's clock; `None` where it is known not to work.
    fn timed(&mut self, calls: u32, record: &mut Recorder<'_>) -> Result<Option<Timed>> {
        let Some(timestamps) = self.timestamps.as_mut().filter(|_| self.broken.is_none()) else {
            return Ok(None);
        };
        let calls = match self.passes {
            Some(passes) => calls.clamp(1, (MOST_PASSES / passes.max(1)).max(1)),
            None => 1,
        };
        let begin = Instant::now();
        let submission = self.gpu.record_and_submit(|encoder| {
            for _ in 0..calls {
                record(encoder, Some(&mut *timestamps))?;
            }
            timestamps.resolve(encoder);
            Ok(())
        })?;
        self.gpu.wait_for(submission)?;
        let wall = begin.elapsed().as_secs_f64();
        let spans = match timestamps.read_blocking() {
            Ok(spans) => spans,
            Err(Error::Unsupported { .. }) => {
                self.broken = Some(NoGpuTime::Backwards);
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        let passes = spans.len() / calls as usize;
        if passes == 0 {
            // Nothing was dispatched.
            self.broken = Some(NoGpuTime::Zero);
            return Ok(None);
        }
        self.passes = Some(passes as u32);
        let calls = spans.chunks(passes);
        let calls = calls.map(|call| call.iter().map(|span| span.seconds).sum());
        Ok(Some(Timed {
            calls: calls.collect(),
            wall,
        }))
    }

    /// Time that `calls` calls take, in as few submissions as they fit in: by the GPU's clock if `by_gpu` and it works, else by
    /// the wall's. For benches that choose the number of calls themselves.
    ///
    /// # Errors
    ///
    /// What recording gives; [`Error::DeviceLost`].
    pub fn time(
        &mut self,
        calls: u64,
        by_gpu: bool,
        record: &mut Recorder<'_>,
    ) -> Result<Duration> {
        let (mut seconds, mut left) = (0.0, calls);
        while left > 0 {
            let now = left.min(u64::from(MOST_CALLS)) as u32;
            let timed = match by_gpu {
                true => self.timed(now, record)?,
                false => None,
            };
            left -= match timed {
                Some(timed) => {
                    seconds += timed.calls.iter().sum::<f64>();
                    timed.calls.len() as u64
                }
                None => {
                    seconds += self.wall(now, record)?;
                    u64::from(now)
                }
            };
        }
        Ok(Duration::from_secs_f64(seconds))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn timed(calls: &[f64], wall: f64) -> Timed {
        Timed {
            calls: calls.to_vec(),
            wall,
        }
    }

    #[test]
    fn a_clock_that_cannot_be_right_is_named() {
        let good = [timed(&[101e-6, 103e-6], 300e-6), timed(&[99e-6], 150e-6)];
        let spread = judge(&good).unwrap();
        assert_eq!(spread.samples.len(), 2);
        assert!((spread.samples[0] - 102e-6).abs() < 1e-12);

        let zero = [timed(&[101e-6, 0.0], 300e-6)];
        assert_eq!(judge(&zero), Err(NoGpuTime::Zero));
        assert_eq!(judge(&[]), Err(NoGpuTime::Zero));

        // Steps of 20 microseconds beside 100.
        let coarse = [timed(&[100e-6, 120e-6, 100e-6, 80e-6], 1e-3)];
        let Err(NoGpuTime::Coarse { step }) = judge(&coarse) else {
            unreachable!("{:?}", judge(&coarse))
        };
        assert!((step - 20e-6).abs() < 1e-12);
        // The same steps are fine beside 100 milliseconds.
        let long_calls = [timed(&[0.10002, 0.1, 0.09998], 0.4)];
        assert!(judge(&long_calls).is_ok());

        // A wrapped counter, or a wrong period.
        let long = [timed(&[101e-6, 103e-6], 300e-6), timed(&[4.0], 150e-6)];
        assert!(matches!(judge(&long), Err(NoGpuTime::Long { times }) if times > 1000.0));
    }

    #[test]
    fn a_spread_keeps_every_sample_and_refuses_what_is_no_number() {
        let spread = Spread::of(vec![3.0, 1.0, 2.0, 5.0, 4.0]).unwrap();
        assert_eq!((spread.p10, spread.median, spread.p90), (1.0, 3.0, 5.0));
        assert_eq!(spread.samples, [3.0, 1.0, 2.0, 5.0, 4.0]);
        assert_eq!(Spread::of(vec![]), None);
        assert_eq!(Spread::of(vec![1.0, f64::NAN]), None);
    }
}
