//! Comparison of a result with what it should be.
//!
//! [`compare`] never says "passed" by accident: NaN on either side fails, infinities must match exactly, a
//! shape mismatch fails, and having compared nothing is its own outcome.

use std::fmt;

/// How far a value may lie from the expected one: `|got - expected| <= absolute + relative * |expected|`.
///
/// Both parts must be finite and at least 0; with anything else a comparison is
/// [`Outcome::InvalidTolerance`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tolerance {
    /// In the unit of the values.
    pub absolute: f64,
    /// In parts of the expected value.
    pub relative: f64,
}

impl Tolerance {
    /// What an f32 kernel may differ from the f64 reference: `1e-5 + 1e-4 * |expected|`.
    pub const F32: Tolerance = Tolerance::new(1e-5, 1e-4);

    /// Nothing: the values must be equal (0 and -0 are).
    pub const EXACT: Tolerance = Tolerance::new(0.0, 0.0);

    /// `absolute + relative * |expected|`.
    pub const fn new(absolute: f64, relative: f64) -> Self {
        Tolerance { absolute, relative }
    }

    /// How far from `expected` a value may lie.
    pub fn allowed(&self, expected: f64) -> f64 {
        self.absolute + self.relative * expected.abs()
    }

    fn is_valid(&self) -> bool {
        [self.absolute, self.relative]
            .iter()
            .all(|part| part.is_finite() && *part >= 0.0)
    }
}

impl fmt::Display for Tolerance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.absolute, self.relative) {
            (absolute, 0.0) => write!(f, "{absolute:e}"),
            (absolute, relative) => write!(f, "{absolute:e} + {relative:e} * |expected|"),
        }
    }
}

/// How a comparison ended. Only [`Outcome::Passed`] is a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// Every element was compared and lies within the tolerance.
    Passed,
    /// At least one element lies outside.
    Failed,
    /// Both sides are empty and of one shape: nothing was shown.
    NothingCompared,
    /// The two shapes differ; no element was compared.
    ShapeMismatch,
    /// A side does not hold as many values as its own shape says; no element was compared.
    LengthMismatch,
    /// A part of the tolerance is NaN, infinite or negative; no element was compared.
    InvalidTolerance,
}

/// One element of a comparison.
#[derive(Debug, Clone, PartialEq)]
pub struct Element {
    /// Where it lies, one index for each axis.
    pub index: Vec<usize>,
    /// What came.
    pub got: f64,
    /// What should have come.
    pub expected: f64,
    /// `|got - expected|`; infinite where a NaN or an infinity does not match.
    pub error: f64,
    /// How large `error` may be.
    pub allowed: f64,
}

/// What [`compare`] found. [`Display`](fmt::Display) gives it in one line.
#[derive(Debug, Clone, PartialEq)]
pub struct Comparison {
    /// How it ended.
    pub outcome: Outcome,
    /// Elements compared.
    pub compared: usize,
    /// Elements outside the tolerance.
    pub failing: usize,
    /// The largest `|got - expected|`; infinite where a NaN or an infinity does not match.
    pub max_error: f64,
    /// The largest `error / allowed`: at most 1 in a pass (0 where `error` is 0, infinite where only
    /// `allowed` is).
    pub worst_ratio: f64,
    /// The element of `worst_ratio`, the first such; `None` where nothing was compared.
    pub worst: Option<Element>,
    /// The tolerance asked for.
    pub tolerance: Tolerance,
    /// The shape that came.
    pub got_shape: Vec<usize>,
    /// The shape that should have come.
    pub expected_shape: Vec<usize>,
    /// Values that came.
    pub got_length: usize,
    /// Values that should have come.
    pub expected_length: usize,
}

impl Comparison {
    /// Whether everything was compared, there was something, and all of it lies within the tolerance.
    #[must_use]
    pub fn passed(&self) -> bool {
        self.outcome == Outcome::Passed
    }
}

/// Compares `got` (f32, f64, or whatever widens to f64) with `expected`, element by element, row-major.
///
/// - NaN on either side fails, even on both.
/// - An infinity passes only against the same infinity.
/// - Shapes must be equal, axis by axis, and each side must hold what its shape says.
///
/// ```
/// use wgpu_attention::compare::{Outcome, Tolerance, compare};
///
/// let close = compare(&[1.0_f32, 2.00001], &[2], &[1.0, 2.0], &[2], Tolerance::F32);
/// assert!(close.passed());
///
/// let nan = compare(&[1.0_f32, f32::NAN], &[2], &[1.0, 2.0], &[2], Tolerance::F32);
/// assert_eq!((nan.outcome, nan.failing), (Outcome::Failed, 1));
/// println!("{nan}");
/// ```
#[must_use]
pub fn compare<T: Copy + Into<f64>>(
    got: &[T],
    got_shape: &[usize],
    expected: &[f64],
    expected_shape: &[usize],
    tolerance: Tolerance,
) -> Comparison {
    let mut comparison = Comparison {
        outcome: Outcome::Passed,
        compared: 0,
        failing: 0,
        max_error: 0.0,
        worst_ratio: 0.0,
        worst: None,
        tolerance,
        got_shape: got_shape.to_vec(),
        expected_shape: expected_shape.to_vec(),
        got_length: got.len(),
        expected_length: expected.len(),
    };
    comparison.outcome = if got_shape != expected_shape {
        Outcome::ShapeMismatch
    } else if !holds(got_shape, got.len()) || !holds(expected_shape, expected.len()) {
        Outcome::LengthMismatch
    } else if !tolerance.is_valid() {
        Outcome::InvalidTolerance
    } else if expected.is_empty() {
        Outcome::NothingCompared
    } else {
        Outcome::Passed
    };
    if comparison.outcome != Outcome::Passed {
        return comparison;
    }

    // A failing element is worse than any that passes; then by ratio, then by error. None is NaN.
    let mut worst = (false, -1.0, 0.0);
    let mut worst_position = 0;
    for (position, (&got, &expected)) in got.iter().zip(expected).enumerate() {
        let error = error(got.into(), expected);
        let allowed = tolerance.allowed(expected);
        // Said as what passes, so that whatever is not a number falls on the failing side.
        let within = error == 0.0 || (error.is_finite() && error <= allowed);
        let ratio = if error == 0.0 {
            0.0
        } else if error.is_finite() && allowed > 0.0 {
            error / allowed
        } else {
            f64::INFINITY
        };

        comparison.compared += 1;
        comparison.failing += usize::from(!within);
        comparison.max_error = comparison.max_error.max(error);
        if (!within, ratio, error) > worst {
            worst = (!within, ratio, error);
            worst_position = position;
        }
    }

    let (_, ratio, error) = worst;
    if comparison.failing > 0 {
        comparison.outcome = Outcome::Failed;
    }
    comparison.worst_ratio = ratio;
    comparison.worst = Some(Element {
        index: index_of(worst_position, expected_shape),
        got: got[worst_position].into(),
        expected: expected[worst_position],
        error,
        allowed: tolerance.allowed(expected[worst_position]),
    });
    comparison
}

/// `|got - expected|`, 0 for equal infinities and infinite wherever it would not be a number.
fn error(got: f64, expected: f64) -> f64 {
    if got == expected {
        return 0.0;
    }
    let difference = (got - expected).abs();
    if difference.is_nan() {
        f64::INFINITY
    } else {
        difference
    }
}

/// Whether `length` values are what `shape` says.
fn holds(shape: &[usize], length: usize) -> bool {
    let elements = if shape.contains(&0) {
        Some(0)
    } else {
        shape
            .iter()
            .try_fold(1_usize, |product, &axis| product.checked_mul(axis))
    };
    elements == Some(length)
}

/// The index on each axis of the element at `position`, row-major. No axis is empty where an element lies.
fn index_of(position: usize, shape: &[usize]) -> Vec<usize> {
    let mut rest = position;
    let mut index = vec![0; shape.len()];
    for (i, &axis) in index.iter_mut().zip(shape).rev() {
        *i = rest % axis;
        rest /= axis;
    }
    index
}

/// A number as short as it stays readable: plain near 1, with an exponent far from it.
struct Short(f64);

impl fmt::Display for Short {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let size = self.0.abs();
        if self.0 == 0.0 || !self.0.is_finite() || (1e-3..1e6).contains(&size) {
            write!(f, "{}", self.0)
        } else {
            write!(f, "{:e}", self.0)
        }
    }
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:?}: got {}, expected {}, error {:.2e}, allowed {:.2e}",
            self.index,
            Short(self.got),
            Short(self.expected),
            self.error,
            self.allowed
        )
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.outcome {
            Outcome::Passed => write!(
                f,
                "passed: {} compared, largest error {:.2e}, at worst {:.3} of what is allowed",
                self.compared, self.max_error, self.worst_ratio
            )?,
            Outcome::Failed => write!(
                f,
                "failed: {} of {} outside {}, largest error {:.2e}",
                self.failing, self.compared, self.tolerance, self.max_error
            )?,
            Outcome::NothingCompared => write!(
                f,
                "nothing compared: both sides are empty, shape {:?}",
                self.expected_shape
            )?,
            Outcome::ShapeMismatch => write!(
                f,
                "shape mismatch: got {:?}, expected {:?}",
                self.got_shape, self.expected_shape
            )?,
            Outcome::LengthMismatch => write!(
                f,
                "length mismatch: got {} values and expected {} for the shape {:?}",
                self.got_length, self.expected_length, self.expected_shape
            )?,
            Outcome::InvalidTolerance => write!(
                f,
                "invalid tolerance {}: both parts must be finite and at least 0",
                self.tolerance
            )?,
        }
        match &self.worst {
            Some(worst) => write!(f, "; worst {worst}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const INF: f64 = f64::INFINITY;
    const NAN: f64 = f64::NAN;

    fn one(got: f64, expected: f64, tolerance: Tolerance) -> Comparison {
        compare(&[got], &[1], &[expected], &[1], tolerance)
    }

    #[test]
    fn one_element_against_one() {
        let wide = Tolerance::new(0.5, 0.25);
        let exact = Tolerance::EXACT;
        for (got, expected, tolerance, passes) in [
            (1.0, 1.0, exact, true),
            (0.0, -0.0, exact, true),
            (1.0, 1.0 + f64::EPSILON, exact, false),
            // 0.5 + 0.25 * |-2| = 1: at the edge, and beyond it on both sides.
            (-3.0, -2.0, wide, true),
            (-1.0, -2.0, wide, true),
            (-3.001, -2.0, wide, false),
            (-0.999, -2.0, wide, false),
            // The relative part is of the expected value, not of what came.
            (100.0, 0.0, wide, false),
            (NAN, 1.0, wide, false),
            (1.0, NAN, wide, false),
            (NAN, NAN, wide, false),
            (NAN, INF, wide, false),
            (INF, INF, exact, true),
            (-INF, -INF, wide, true),
            (INF, -INF, wide, false),
            (1.0, INF, wide, false),
            (f64::MAX, INF, wide, false),
            (INF, 1.0, wide, false),
            // The difference and the allowance both overflow.
            (-f64::MAX, f64::MAX, Tolerance::new(0.0, 2.0), false),
        ] {
            let comparison = one(got, expected, tolerance);
            assert_eq!(
                comparison.passed(),
                passes,
                "got {got}, expected {expected}, {tolerance}"
            );
            assert_eq!(comparison.compared, 1);
            assert_eq!(comparison.failing, usize::from(!passes));
            assert!(!comparison.worst_ratio.is_nan() && !comparison.max_error.is_nan());
            assert_eq!(comparison.worst_ratio > 1.0, !passes);
        }
    }

    #[test]
    fn the_f32_rule() {
        assert_eq!(Tolerance::F32.allowed(-10.0), 1e-5 + 1e-4 * 10.0);
        assert!(one(10.001, 10.0, Tolerance::F32).passed());
        assert!(!one(10.0011, 10.0, Tolerance::F32).passed());
    }

    #[test]
    fn the_worst_is_by_ratio_and_located() {
        // Errors 0, 5, 0, 0, 2, 1 of 0.1 * |expected| = 10, 10, 10, 10, 1, 1.
        let expected = [100.0, 100.0, 100.0, 100.0, 10.0, 10.0];
        let got = [100.0_f32, 105.0, 100.0, 100.0, 12.0, 11.0];
        let c = compare(
            &got,
            &[1, 2, 3],
            &expected,
            &[1, 2, 3],
            Tolerance::new(0.0, 0.1),
        );
        assert_eq!((c.outcome, c.compared, c.failing), (Outcome::Failed, 6, 1));
        assert_eq!((c.max_error, c.worst_ratio), (5.0, 2.0));
        let worst = c.worst.unwrap();
        assert_eq!(worst.index, [0, 1, 1]);
        assert_eq!((worst.got, worst.expected), (12.0, 10.0));
        assert_eq!((worst.error, worst.allowed), (2.0, 1.0));
    }

    #[test]
    fn nan_is_the_worst_wherever_it_stands() {
        for position in 0..3 {
            let mut got = [9.0, 9.0, 9.0];
            got[position] = NAN;
            let c = compare(&got, &[3], &[0.0; 3], &[3], Tolerance::F32);
            assert_eq!((c.failing, c.max_error, c.worst_ratio), (3, INF, INF));
            assert_eq!(c.worst.unwrap().index, [position]);
            // Without any allowance every ratio is infinite; the error decides.
            let c = compare(&got, &[3], &[0.0; 3], &[3], Tolerance::EXACT);
            assert_eq!(c.worst.unwrap().index, [position]);
        }
    }

    #[test]
    fn a_small_error_of_a_smaller_allowance_is_worse() {
        // Allowed 10, 1, 0.5.
        let (got, expected) = ([104.0, 10.75, 5.25], [100.0, 10.0, 5.0]);
        let c = compare(&got, &[3], &expected, &[3], Tolerance::new(0.0, 0.1));
        assert!(c.passed());
        assert_eq!((c.max_error, c.worst_ratio), (4.0, 0.75));
        assert_eq!(c.worst.unwrap().index, [1]);
    }

    #[test]
    fn of_equally_bad_elements_the_first_is_told() {
        let c = compare(&[1.0; 4], &[2, 2], &[0.0; 4], &[2, 2], Tolerance::F32);
        assert_eq!(c.worst.unwrap().index, [0, 0]);
    }

    #[test]
    fn scalars_have_no_index() {
        let c = compare(&[1.0], &[], &[1.0], &[], Tolerance::EXACT);
        assert!(c.passed());
        assert!(c.worst.unwrap().index.is_empty());
    }

    #[test]
    fn what_cannot_be_compared_is_not_a_pass() {
        let values = [0.0; 6];
        let big = usize::MAX;
        for (got, got_shape, expected, expected_shape, outcome) in [
            (6, vec![2, 3], 6, vec![3, 2], Outcome::ShapeMismatch),
            (6, vec![6], 6, vec![6, 1], Outcome::ShapeMismatch),
            (0, vec![0, 3], 0, vec![3, 0], Outcome::ShapeMismatch),
            (0, vec![0], 6, vec![6], Outcome::ShapeMismatch),
            (5, vec![2, 3], 6, vec![2, 3], Outcome::LengthMismatch),
            (6, vec![2, 3], 5, vec![2, 3], Outcome::LengthMismatch),
            (0, vec![2, 3], 0, vec![2, 3], Outcome::LengthMismatch),
            (4, vec![big, 4], 4, vec![big, 4], Outcome::LengthMismatch),
            (0, vec![0, 3], 0, vec![0, 3], Outcome::NothingCompared),
            (
                0,
                vec![big, big, 0],
                0,
                vec![big, big, 0],
                Outcome::NothingCompared,
            ),
        ] {
            let c = compare(
                &values[..got],
                &got_shape,
                &values[..expected],
                &expected_shape,
                Tolerance::F32,
            );
            assert_eq!(c.outcome, outcome, "{got_shape:?} {expected_shape:?}");
            assert!(!c.passed());
            assert_eq!((c.compared, c.failing), (0, 0));
            assert_eq!(c.worst, None);
        }
    }

    #[test]
    fn a_tolerance_that_is_no_number_is_not_a_pass() {
        for bad in [NAN, -1e-9, INF, -INF] {
            for tolerance in [Tolerance::new(bad, 0.0), Tolerance::new(0.0, bad)] {
                let c = one(1.0, 1.0, tolerance);
                assert_eq!(c.outcome, Outcome::InvalidTolerance);
                assert!(!c.passed());
            }
        }
    }

    #[test]
    fn each_outcome_is_one_clear_line() {
        let shapes = |got: &[usize], expected: &[usize], n: usize| {
            compare(&vec![0.0; n], got, &vec![0.0; n], expected, Tolerance::F32).to_string()
        };
        assert_eq!(
            shapes(&[2, 3], &[3, 2], 6),
            "shape mismatch: got [2, 3], expected [3, 2]"
        );
        assert_eq!(
            shapes(&[7], &[7], 6),
            "length mismatch: got 6 values and expected 6 for the shape [7]"
        );
        assert_eq!(
            shapes(&[0, 4], &[0, 4], 0),
            "nothing compared: both sides are empty, shape [0, 4]"
        );
        assert_eq!(
            one(1.0, 1.0, Tolerance::new(NAN, 1e-4)).to_string(),
            "invalid tolerance NaN + 1e-4 * |expected|: both parts must be finite and at least 0"
        );
        assert_eq!(
            one(1.5, 1.0, Tolerance::new(1.0, 0.0)).to_string(),
            "passed: 1 compared, largest error 5.00e-1, at worst 0.500 of what is allowed; \
             worst [0]: got 1.5, expected 1, error 5.00e-1, allowed 1.00e0"
        );
        assert_eq!(
            compare(&[0.0, NAN], &[1, 2], &[0.0, 1e-9], &[1, 2], Tolerance::F32).to_string(),
            "failed: 1 of 2 outside 1e-5 + 1e-4 * |expected|, largest error inf; \
             worst [0, 1]: got NaN, expected 1e-9, error inf, allowed 1.00e-5"
        );
    }
}
