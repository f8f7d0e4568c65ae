//! Cases of the ONNX operator `Attention`, opsets 23 to 25.

use super::Case;
use super::attention::{AttentionCase, Layout, Operand, Output};
use super::host::{Values, stored_type};
use super::kind::{Kind, unsupported};
use crate::Result;
use crate::attention::{Alignment, AttentionRules, WeightsStage};
use crate::tensor::shape_text;
use crate::tensor_file::{ElementKind, FileTensor};

pub(super) const ONNX: Kind = Kind {
    names: &["onnx"],
    attributes: &[
        "is_causal",
        "kv_num_heads",
        "left_window_size",
        "official_atol",
        "official_rtol",
        "opset",
        "q_num_heads",
        "qk_matmul_output_mode",
        "right_window_size",
        "scale",
        "softcap",
        "softmax_precision",
    ],
    inputs: &[
        "Q",
        "K",
        "V",
        "attn_mask",
        "past_key",
        "past_value",
        "nonpad_kv_seqlen",
    ],
    run: |case, selection, engine| read(case)?.run(selection, engine),
};

fn read(case: &Case) -> Result<AttentionCase> {
    let side_by_side = case.input("Q")?.shape.len() == 3;
    let operand = |name, heads| {
        let layout = match side_by_side {
            true => Layout::SideBySide(case.attr_usize(heads)?),
            false => Layout::HeadsFirst,
        };
        Operand::new(case, case.input(name)?, layout)
    };
    let mut read = AttentionCase::new(
        case,
        operand("Q", "q_num_heads")?,
        operand("K", "kv_num_heads")?,
        operand("V", "kv_num_heads")?,
    )?;
    let (heads, kv_heads) = (read.problem.heads, read.problem.kv_heads);
    case.expect_sizes(&[("q_num_heads", heads), ("kv_num_heads", kv_heads)])?;
    // The type that the softmax should be computed in (float, float16, double, bfloat16). Here it is always f32:
    // what that is worth, the tolerance says.
    case.choice("softmax_precision", &[1, 10, 11, 16], 1)?;
    let mode = case.choice("qk_matmul_output_mode", &[0, 1, 2, 3], 0)?;

    let past = read.read_past(case)?;
    let (q_len, kv_len) = (read.problem.q_len, read.problem.kv_len);

    let scale = case.attributes.contains_key("scale");
    let mut rules = AttentionRules {
        scale: scale
            .then(|| case.attr_f64("scale"))
            .transpose()?
            .map(|scale| scale as f32),
        softcap: case.softcap()?,
        ..Default::default()
    };
    let left = case.window("left_window_size")?;
    let right = match case.choice("is_causal", &[0, 1], 0)? {
        1 => Some(0),
        _ => case.window("right_window_size")?,
    };
    read.kv_lens = case.lengths("nonpad_kv_seqlen")?;
    let placed = match read.kv_lens {
        // The last query's own key is the last that is there.
        Some(_) => Some((Alignment::BottomRight, left, right)),
        None => match place(past, left, right, q_len, kv_len) {
            // Causal, and more new keys than queries: nobody sees the keys past the last query's own.
            None if right == Some(0) && past + q_len <= kv_len => {
                read.kv_lens = Some(vec![past + q_len; read.problem.batch]);
                Some((Alignment::BottomRight, left, right))
            }
            placed => placed,
        },
    };
    let Some((alignment, left, right)) = placed else {
        return Err(unsupported(
            format!("a window around key i + {past} of {kv_len} for {q_len} queries"),
            "own keys are counted from the first or the last key",
        ));
    };
    rules.alignment = Some(alignment);
    rules.window_left = left;
    rules.causal = right == Some(0);
    rules.window_right = right.filter(|keys| *keys > 0);
    read.problem.rules = rules;

    if let Some(mask) = case.input_opt("attn_mask") {
        let padded = pad_keys(case, mask, kv_len)?;
        if mask.dtype == ElementKind::Bool {
            read.mask = Some(padded);
        } else {
            stored_type(mask)?;
            read.bias = Some(padded);
        }
    }
    let stages = [
        WeightsStage::Products,
        WeightsStage::Capped,
        WeightsStage::Masked,
        WeightsStage::Weights,
    ];
    read.outputs = vec![
        ("Y", Output::Out),
        ("present_key", Output::PresentKey),
        ("present_value", Output::PresentValue),
        ("qk_matmul_output", Output::Weights(stages[mode])),
    ];
    Ok(read)
}

/// The alignment, and the windows from there, that say the same as windows around key `i + offset`.
fn place(
    offset: usize,
    left: Option<usize>,
    right: Option<usize>,
    q_len: usize,
    kv_len: usize,
) -> Option<(Alignment, Option<usize>, Option<usize>)> {
    let bottom_right = kv_len as i128 - q_len as i128;
    let mut corners = [
        (Alignment::BottomRight, bottom_right),
        (Alignment::TopLeft, 0),
    ];
    let shift = |corner: i128| offset as i128 - corner;
    corners.sort_by_key(|(_, corner)| shift(*corner).abs());
    corners.into_iter().find_map(|(alignment, corner)| {
        let moved = |window: Option<usize>, by: i128| match window {
            None => Some(None),
            Some(keys) => usize::try_from(keys as i128 + by).ok().map(Some),
        };
        Some((
            alignment,
            moved(left, -shift(corner))?,
            moved(right, shift(corner))?,
        ))
    })
}

/// A mask whose last axis may be too short: the keys past its end are hidden.
fn pad_keys(case: &Case, mask: &FileTensor, kv_len: usize) -> Result<Values> {
    let hidden = if mask.dtype == ElementKind::Bool {
        0.0
    } else {
        f64::NEG_INFINITY
    };
    let (mut shape, mut values) = (mask.shape.clone(), Vec::new());
    let Some(keys) = shape.last_mut().filter(|keys| **keys <= kv_len) else {
        return Err(case.error(format!(
            "input \"attn_mask\": expected at most {kv_len} keys along the last axis, got {}",
            shape_text(&mask.shape)
        )));
    };
    let given = std::mem::replace(keys, kv_len);
    let rows: usize = mask.shape[..mask.shape.len() - 1].iter().product();
    for row in 0..rows {
        values.extend_from_slice(&mask.values[row * given..(row + 1) * given]);
        values.resize((row + 1) * kv_len, hidden);
    }
    Ok(Values { shape, values })
}

impl Case {
    /// An attribute that is one of some numbers; `default` where it is not there.
    pub(super) fn choice(&self, name: &str, of: &[usize], default: usize) -> Result<usize> {
        if !self.attributes.contains_key(name) {
            return Ok(default);
        }
        let given = self.attr_usize(name)?;
        if of.contains(&given) {
            Ok(given)
        } else {
            Err(self.attribute_error(name, &format!("one of {of:?}"), given))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Against the definition: key j is seen if `i + offset - left <= j <= i + offset + right`.
    #[test]
    fn windows_around_an_offset_are_placed_exactly_or_not_at_all() {
        let windows = [None, Some(0), Some(1), Some(3)];
        let mut placed = 0;
        for (q_len, kv_len, offset) in (0..5 * 7 * 7).map(|n| (n % 5, n / 5 % 7, n / 35)) {
            for (left, right) in windows.iter().flat_map(|l| windows.map(|r| (*l, r))) {
                let sees = |own: i128, key: i128, left: Option<usize>, right: Option<usize>| {
                    left.is_none_or(|n| own - key <= n as i128)
                        && right.is_none_or(|n| key - own <= n as i128)
                };
                let Some((alignment, l, r)) = place(offset, left, right, q_len, kv_len) else {
                    continue;
                };
                placed += 1;
                for (i, j) in (0..q_len * kv_len).map(|n| (n / kv_len, n % kv_len)) {
                    let (i, j) = (i as i128, j as i128);
                    let own = match alignment {
                        Alignment::TopLeft => i,
                        Alignment::BottomRight => i + kv_len as i128 - q_len as i128,
                    };
                    assert_eq!(
                        sees(own, j, l, r),
                        sees(i + offset as i128, j, left, right),
                        "query {i} key {j}: {q_len} x {kv_len}, offset {offset}, windows {left:?} {right:?}"
                    );
                }
            }
        }
        assert!(placed > 1000, "{placed}");
        assert_eq!(
            place(4, Some(2), Some(0), 3, 7),
            Some((Alignment::BottomRight, Some(2), Some(0)))
        );
        assert_eq!(place(9, Some(2), None, 3, 7), None);
    }
}
