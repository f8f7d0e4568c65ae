//! Rotary position embedding: pairs of channels turned by an angle that grows with the token's position.

use super::{check_length, zeros};
use crate::error::{Error, Result};

/// Which two channels of the R rotary ones turn together as pair i of R/2.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Pairing {
    /// Channels i and `i + R/2` (GPT-NeoX, Llama).
    #[default]
    HalfSplit,
    /// Channels `2i` and `2i + 1` (GPT-J).
    Interleaved,
}

/// How far pair i of R/2 is turned at position p.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Angles<'a> {
    /// By `p * base^(-2i/R)`. Finite and above 0; 10000 in the original.
    Base(f64),
    /// By the angle whose cosine and sine these are, each `(positions, R/2)`: any other scheme, or angles that
    /// were rounded already.
    Tables {
        /// Cosines.
        cos: &'a [f64],
        /// Sines.
        sin: &'a [f64],
    },
}

impl Default for Angles<'_> {
    fn default() -> Self {
        Angles::Base(10_000.0)
    }
}

/// A rotary embedding. The default turns all channels, half-split, with the base 10000.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Rotary<'a> {
    /// R, how many channels of a head turn: even, from 2 to D; D where `None`. Those behind stay as they are.
    pub dims: Option<usize>,
    /// Which channels turn together.
    pub pairing: Pairing,
    /// By how much.
    pub angles: Angles<'a>,
}

/// What [`rotary`] is computed from. Axes: batch B, tokens T, heads H, head dimension D.
#[derive(Debug, Clone, Copy, Default)]
pub struct RotaryInputs<'a> {
    /// B.
    pub batch: usize,
    /// T.
    pub tokens: usize,
    /// H.
    pub heads: usize,
    /// D, at least 2.
    pub head_dim: usize,
    /// Queries or keys, `(B, T, H, D)` contiguous.
    pub x: &'a [f64],
    /// Where each batch item's first token stands, `(B)`: token t of item b has position `starts[b] + t`. All
    /// begin at 0 where `None`. Behind a cache it is how many tokens the item has there.
    pub starts: Option<&'a [usize]>,
    /// The embedding.
    pub rotary: Rotary<'a>,
}

/// Rotary embedding (Su and others 2021, [arXiv:2104.09864](https://arxiv.org/abs/2104.09864)): the channels
/// (a, b) of a pair become `(a cos - b sin, b cos + a sin)`, all heads of a token alike.
///
/// Applied to queries and keys it makes their product depend on how far apart they stand, not on where. A key is
/// turned once, by its own position, so that a cache holds turned keys.
///
/// Gives `(B, T, H, D)`; shapes stand at [`RotaryInputs`]. Any of B, T, H may be 0.
///
/// # Errors
///
/// [`Error::Shape`] where a length is not what the shapes call for, the tables are not `(positions, R/2)` alike
/// or end before the last token's position, or the result cannot be allocated; [`Error::Parameter`] where R is
/// odd, 0 or more than D, the base not finite and above 0, or a position beyond what this machine can count.
///
/// ```
/// use wgpu_attention::reference::{Angles, Rotary, RotaryInputs, rotary};
///
/// // One pair; every position turns it by a quarter.
/// let turned = rotary(&RotaryInputs {
///     batch: 1, tokens: 3, heads: 1, head_dim: 3,
///     x: &[1.0, 2.0, 7.0, 1.0, 2.0, 7.0, 1.0, 2.0, 7.0],
///     rotary: Rotary {
///         dims: Some(2),
///         angles: Angles::Tables { cos: &[1.0, 0.0, -1.0], sin: &[0.0, 1.0, 0.0] },
///         ..Default::default()
///     },
///     ..Default::default()
/// })?;
/// assert_eq!(turned, [1.0, 2.0, 7.0, -2.0, 1.0, 7.0, -1.0, -2.0, 7.0]);
/// # Ok::<(), wgpu_attention::Error>(())
/// ```
pub fn rotary(inputs: &RotaryInputs) -> Result<Vec<f64>> {
    let RotaryInputs {
        batch,
        tokens,
        heads,
        head_dim,
        x,
        starts,
        rotary,
    } = *inputs;
    let axes = [
        ("batch", batch),
        ("tokens", tokens),
        ("heads", heads),
        ("head_dim", head_dim),
    ];
    check_length("x", &axes, x.len())?;
    if let Some(starts) = starts {
        check_length("starts", &[("batch", batch)], starts.len())?;
    }
    // The furthest start, and where the positions end.
    let start = starts.map_or(0, |starts| starts.iter().copied().max().unwrap_or(0));
    let end = start.checked_add(tokens).ok_or_else(|| {
        Error::parameter(
            "starts",
            start,
            format!("must leave room for the positions of {tokens} tokens"),
        )
    })?;
    let dims = check(&rotary, head_dim, if x.is_empty() { 0 } else { end })?;

    let mut turned = zeros("rotary", &axes)?;
    turned.copy_from_slice(x);
    if turned.is_empty() {
        return Ok(turned);
    }
    for (row, channels) in turned.chunks_exact_mut(head_dim).enumerate() {
        let (item, token) = (row / heads / tokens, row / heads % tokens);
        let position = starts.map_or(0, |starts| starts[item]) + token;
        for pair in 0..dims / 2 {
            let (first, second) = match rotary.pairing {
                Pairing::HalfSplit => (pair, pair + dims / 2),
                Pairing::Interleaved => (2 * pair, 2 * pair + 1),
            };
            let (cos, sin) = match rotary.angles {
                Angles::Base(base) => {
                    let angle = position as f64 * base.powf(-2.0 * pair as f64 / dims as f64);
                    (angle.cos(), angle.sin())
                }
                Angles::Tables { cos, sin } => {
                    let at = position * (dims / 2) + pair;
                    (cos[at], sin[at])
                }
            };
            let (a, b) = (channels[first], channels[second]);
            channels[first] = a * cos - b * sin;
            channels[second] = b * cos + a * sin;
        }
    }
    Ok(turned)
}

/// R, or an error where the embedding is unsound or its tables are shorter than `positions`.
pub(super) fn check(rotary: &Rotary, head_dim: usize, positions: usize) -> Result<usize> {
    let dims = rotary.dims.unwrap_or(head_dim);
    if dims < 2 || !dims.is_multiple_of(2) || dims > head_dim {
        return Err(Error::parameter(
            "dims",
            dims,
            format!("must be even and from 2 to head_dim = {head_dim}; channels turn in pairs"),
        ));
    }
    match rotary.angles {
        Angles::Base(base) if !(base.is_finite() && base > 0.0) => {
            Err(Error::parameter("base", base, "must be finite and above 0"))
        }
        Angles::Base(_) => Ok(dims),
        Angles::Tables { cos, sin } => {
            let pairs = dims / 2;
            if cos.len() != sin.len() {
                return Err(Error::shape(
                    "sin",
                    format_args!("{} values, as many as cos", cos.len()),
                    sin.len(),
                ));
            }
            // One that cannot be counted is longer than any table.
            let needed = positions.checked_mul(pairs);
            if cos.len() % pairs != 0 || needed.is_none_or(|needed| cos.len() < needed) {
                return Err(Error::shape(
                    "cos",
                    format_args!(
                        "(positions, dims / 2 = {pairs}) with {positions} positions or more, as far as the tokens reach"
                    ),
                    format_args!("{} values", cos.len()),
                ));
            }
            Ok(dims)
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::super::testing::{assert_close, wave};
    use super::*;
    use std::f64::consts::FRAC_PI_2;

    fn one_head<'a>(
        tokens: usize,
        head_dim: usize,
        x: &'a [f64],
        rotary: Rotary<'a>,
    ) -> RotaryInputs<'a> {
        RotaryInputs {
            batch: 1,
            tokens,
            heads: 1,
            head_dim,
            x,
            starts: None,
            rotary,
        }
    }

    #[test]
    fn pairs_worked_by_hand() {
        // Pair 0 turns by a quarter, pair 1 by a half; channels 4 and 5 stay.
        let x = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        for (pairing, expected) in [
            // (1, 3) by a quarter: (-3, 1). (2, 4) by a half: (-2, -4).
            (Pairing::HalfSplit, [-3.0, -2.0, 1.0, -4.0, 5.0, 6.0]),
            // (1, 2) by a quarter: (-2, 1). (3, 4) by a half: (-3, -4).
            (Pairing::Interleaved, [-2.0, 1.0, -3.0, -4.0, 5.0, 6.0]),
        ] {
            let of = |angles| Rotary {
                dims: Some(4),
                pairing,
                angles,
            };
            let (cos, sin) = ([0.0, -1.0], [1.0, 0.0]);
            let tables = of(Angles::Tables {
                cos: &cos,
                sin: &sin,
            });
            let turned = rotary(&one_head(1, 6, &x, tables)).unwrap();
            assert_eq!(turned, expected, "{pairing:?}");
        }
    }

    #[test]
    fn the_angle_is_the_position_by_a_power_of_the_base() {
        // R = 4: pair 0 turns by p, pair 1 by p / sqrt(base). Unit vectors become (cos, sin).
        let x = [1.0, 1.0, 0.0, 0.0].repeat(3);
        let rule = Rotary {
            angles: Angles::Base(100.0),
            ..Default::default()
        };
        let starts = [5];
        let inputs = RotaryInputs {
            starts: Some(&starts),
            ..one_head(3, 4, &x, rule)
        };
        let expected: Vec<f64> = [5.0_f64, 6.0, 7.0]
            .iter()
            .flat_map(|p| [p.cos(), (p / 10.0).cos(), p.sin(), (p / 10.0).sin()])
            .collect();
        assert_close(&rotary(&inputs).unwrap(), &expected, 1e-14);
        // The default base: pair i of R = 128 turns by 10000^(-i/64), so pair 32 by a hundredth.
        let mut x = vec![0.0; 128 * 2];
        x[128 + 32] = 1.0;
        let turned = rotary(&one_head(2, 128, &x, Rotary::default())).unwrap();
        let (cos, sin) = (0.01_f64.cos(), 0.01_f64.sin());
        assert_close(&[turned[128 + 32], turned[128 + 96]], &[cos, sin], 1e-14);
        assert_eq!(turned[..128], x[..128]);
        // The power is of R, not of D: pair 1 of R = 4 in six channels turns by 1 / sqrt(base) too.
        let few = Rotary {
            dims: Some(4),
            ..rule
        };
        let x = [1.0, 1.0, 0.0, 0.0, 3.0, 4.0].repeat(2);
        let turned = rotary(&one_head(2, 6, &x, few)).unwrap();
        let (whole, tenth) = (1.0_f64, 0.1_f64);
        let expected = [whole.cos(), tenth.cos(), whole.sin(), tenth.sin(), 3.0, 4.0];
        assert_close(&turned[6..], &expected, 1e-15);
        // One pair has no power in it: a base makes no difference, and position 1 turns by 1.
        let turned = rotary(&one_head(2, 2, &[0.0, 0.0, 1.0, 0.0], rule)).unwrap();
        assert_close(&turned, &[0.0, 0.0, 1.0_f64.cos(), 1.0_f64.sin()], 1e-15);
    }

    #[test]
    fn each_item_has_its_own_start_and_heads_turn_alike() {
        let (batch, tokens, heads, head_dim) = (2, 2, 3, 2);
        let quarter = |p: usize| (p as f64 * FRAC_PI_2).cos().round();
        let cos: Vec<f64> = (0..9).map(quarter).collect();
        let sin: Vec<f64> = (0..9).map(|p| quarter(p + 3)).collect();
        let x: Vec<f64> = (0..batch * tokens * heads)
            .flat_map(|row| [row as f64 + 1.0, 0.5])
            .collect();
        let turned = rotary(&RotaryInputs {
            batch,
            tokens,
            heads,
            head_dim,
            x: &x,
            starts: Some(&[1, 7]),
            rotary: Rotary {
                angles: Angles::Tables {
                    cos: &cos,
                    sin: &sin,
                },
                ..Default::default()
            },
        })
        .unwrap();
        // Positions 1, 2 and 7, 8: a quarter, two, three, none.
        for (row, got) in turned.chunks(2).enumerate() {
            let a = row as f64 + 1.0;
            let expected = match row / heads {
                0 => [-0.5, a],
                1 => [-a, -0.5],
                2 => [0.5, -a],
                _ => [a, 0.5],
            };
            assert_eq!(got, expected, "row {row}");
        }
    }

    #[test]
    fn lengths_are_kept_and_products_depend_on_the_distance() {
        let (head_dim, dims) = (10, 8);
        let (q, k) = (wave(head_dim, 0.7), wave(head_dim, 1.3));
        let dot = |a: &[f64], b: &[f64]| -> f64 { a.iter().zip(b).map(|(a, b)| a * b).sum() };
        for pairing in [Pairing::HalfSplit, Pairing::Interleaved] {
            let at = |x: &[f64], position: usize| {
                let rule = Rotary {
                    dims: Some(dims),
                    pairing,
                    angles: Angles::Base(50.0),
                };
                rotary(&RotaryInputs {
                    starts: Some(&[position]),
                    ..one_head(1, head_dim, x, rule)
                })
                .unwrap()
            };
            for (m, n) in [(0, 0), (3, 1), (1, 3), (40, 17)] {
                let near = dot(&at(&q, m), &at(&k, n));
                let far = dot(&at(&q, m + 1000), &at(&k, n + 1000));
                assert!((near - far).abs() < 1e-11, "{pairing:?} {m} {n}");
                let other = dot(&at(&q, m + 1), &at(&k, n));
                assert!((near - other).abs() > 1e-3, "{pairing:?} {m} {n}");
                let turned = at(&q, m);
                assert!((dot(&turned, &turned) - dot(&q, &q)).abs() < 1e-12);
                assert_eq!(turned[dims..], q[dims..]);
            }
            assert_eq!(at(&q, 0), q);
        }
    }

    #[test]
    fn a_value_that_is_not_a_number_stays_in_its_pair() {
        let x = [f64::NAN, 1.0, 2.0, 3.0];
        let rule = Rotary {
            pairing: Pairing::Interleaved,
            ..Default::default()
        };
        let turned = rotary(&one_head(1, 4, &x, rule)).unwrap();
        assert!(turned[0].is_nan() && turned[1].is_nan());
        assert_eq!(turned[2..], [2.0, 3.0]);
    }

    #[test]
    fn empty_axes_work() {
        for (batch, tokens, heads) in [(0, 3, 2), (2, 0, 2), (2, 3, 0), (0, usize::MAX, 1)] {
            let starts = vec![4; batch];
            let (cos, sin) = ([1.0], [0.0]);
            let inputs = RotaryInputs {
                batch,
                tokens,
                heads,
                head_dim: 2,
                x: &[],
                starts: Some(&starts),
                rotary: Rotary {
                    angles: Angles::Tables {
                        cos: &cos,
                        sin: &sin,
                    },
                    ..Default::default()
                },
            };
            assert!(
                rotary(&inputs).unwrap().is_empty(),
                "{batch} {tokens} {heads}"
            );
        }
    }

    #[test]
    fn each_wrong_argument_is_named() {
        let named = |inputs: RotaryInputs| match rotary(&inputs) {
            Err(Error::Shape { argument, .. }) => argument,
            Err(Error::Parameter { parameter, .. }) => parameter.into(),
            other => format!("{other:?}"),
        };
        let x = [0.5; 12];
        let good = one_head(3, 4, &x, Rotary::default());
        assert_eq!(rotary(&good).unwrap().len(), 12);
        assert_eq!(named(RotaryInputs { x: &x[1..], ..good }), "x");
        for starts in [&[][..], &[0, 0]] {
            let starts = Some(starts);
            assert_eq!(named(RotaryInputs { starts, ..good }), "starts");
        }
        let starts = Some(&[usize::MAX - 2][..]);
        assert_eq!(named(RotaryInputs { starts, ..good }), "starts");
        let with = |dims, angles| RotaryInputs {
            rotary: Rotary {
                dims,
                angles,
                ..Default::default()
            },
            ..good
        };
        for dims in [0, 1, 3, 5, 6, usize::MAX] {
            assert_eq!(named(with(Some(dims), Angles::default())), "dims", "{dims}");
        }
        // Without dims they are D, which is odd.
        assert_eq!(named(one_head(4, 3, &x, Rotary::default())), "dims");
        for base in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert_eq!(named(with(None, Angles::Base(base))), "base", "{base}");
        }
        let table = [0.25; 12];
        let tables = |cos, sin| with(None, Angles::Tables { cos, sin });
        assert_eq!(rotary(&tables(&table[..6], &table[..6])).unwrap().len(), 12);
        assert_eq!(named(tables(&table[..6], &table[..8])), "sin");
        // Two positions of three; half a position too many.
        assert_eq!(named(tables(&table[..4], &table[..4])), "cos");
        assert_eq!(named(tables(&table[..7], &table[..7])), "cos");
        // A start of 3 reaches position 5.
        let starts = Some(&[3][..]);
        let reaching = |n: usize| RotaryInputs {
            starts,
            ..tables(&table[..n], &table[..n])
        };
        assert_eq!(rotary(&reaching(12)).unwrap().len(), 12);
        let error = rotary(&reaching(10)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "cos: expected (positions, dims / 2 = 2) with 6 positions or more, as far as the tokens reach, got 10 values"
        );
    }
}
