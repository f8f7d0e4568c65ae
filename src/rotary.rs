//! Rotary position embedding: channels of queries and keys, two by two, turned by an angle that grows with the position.

use crate::cache::{Append, Moves, Place};
use crate::element::ElementType;
use crate::gpu::Gpu;
use crate::kernels::Kernel;
use crate::plan::size;
use crate::tensor::{Tensor, TensorView, elements};
use crate::{Error, Result};

/// Which channels of a head are turned together; R channels are turned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RotaryPairing {
    /// i and i + R/2, as Llama and GPT-NeoX have it.
    HalfSplit,
    /// 2i and 2i + 1, as GPT-J has it.
    Interleaved,
}

/// Angles by a base. Plain data: start from [`RotaryConfig::new`] and change fields.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RotaryConfig {
    /// Channels of a head that are turned (R), the first ones: an even number. The others stay as they are.
    pub dims: usize,
    /// Which of them belong together.
    pub pairing: RotaryPairing,
    /// Pair i of position p is turned by `p * base^(-2i/R)` radians. 10000 in the paper.
    pub base: f64,
    /// Positions that there are angles for: 0 to this number less 1.
    pub positions: usize,
}

impl RotaryConfig {
    /// Halves belong together, base 10000.
    pub fn new(dims: usize, positions: usize) -> Self {
        RotaryConfig {
            dims,
            pairing: RotaryPairing::HalfSplit,
            base: 10_000.0,
            positions,
        }
    }
}

/// Rotary embedding (Su and others 2021, "RoFormer", [arXiv:2104.09864](https://arxiv.org/abs/2104.09864)): the
/// cosines and sines of all positions, on the GPU. Cheap to clone; layers share it.
///
/// ```
/// # use wgpu_attention::*;
/// # fn turn(gpu: &Gpu, layer: MultiHeadAttention, q: &TensorView, out: &TensorView) -> Result<()> {
/// let rotary = Rotary::new(gpu, RotaryConfig::new(64, 4096))?;
/// // In a layer:
/// let layer = layer.with_rotary(&rotary)?;
/// // By itself, (B, T, H, D) of positions 100 to 100 + T:
/// let mut encoder = gpu.device().create_command_encoder(&Default::default());
/// rotary.encode(&mut encoder, RotaryArguments { first: 100, ..RotaryArguments::new(q, out) })?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Rotary {
    dims: usize,
    pairing: RotaryPairing,
    positions: usize,
    /// `(positions, R)`: cosines of the R/2 pairs, and behind them their sines.
    table: TensorView,
    append: Append,
}

impl std::fmt::Debug for Rotary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rotary")
            .field("dims", &self.dims)
            .field("pairing", &self.pairing)
            .field("positions", &self.positions)
            .finish_non_exhaustive()
    }
}

/// The operands of [`Rotary::encode`].
#[derive(Clone, Copy, Debug)]
pub struct RotaryArguments<'a> {
    /// `(B, T, heads, D)`, f32, f16 or bf16, any strides but a contiguous last axis; D is at least the channels that are turned.
    pub x: &'a TensorView,
    /// The same shape, any of these types; overwritten. May not share a buffer with `x` or `starts`. Rows of 16-bit
    /// elements begin on whole words.
    pub out: &'a TensorView,
    /// The position of every batch item's first token; added to `starts`. A parameter of the dispatch: where it grows
    /// from call to call, each makes a parameter buffer and a bind group, which `starts` does not.
    pub first: usize,
    /// `(B)`, u32, contiguous: the position of each batch item's first token. (Positions past the last that there are
    /// angles for, which only the GPU sees, are taken for the last.)
    pub starts: Option<&'a TensorView>,
}

impl<'a> RotaryArguments<'a> {
    /// Positions from 0.
    pub fn new(x: &'a TensorView, out: &'a TensorView) -> Self {
        RotaryArguments {
            x,
            out,
            first: 0,
            starts: None,
        }
    }
}

impl Rotary {
    /// Angles by a base. They are computed in f64; cosines and sines are rounded to f32 once.
    ///
    /// # Errors
    ///
    /// [`Error::Parameter`] for `dims` that are 0 or odd, no positions, or a base that is not finite and above 0;
    /// [`Error::LimitExceeded`] for a table that the device cannot bind, or a device with fewer than 8 storage buffers a
    /// stage; [`Error::OutOfMemory`], [`Error::Shader`].
    pub fn new(gpu: &Gpu, config: RotaryConfig) -> Result<Self> {
        let RotaryConfig {
            dims,
            pairing,
            base,
            positions,
        } = config;
        if !(base.is_finite() && base > 0.0) {
            return Err(Error::parameter("base", base, "must be finite and above 0"));
        }
        let count = Self::check(gpu, dims, positions)?;
        let half = dims / 2;
        let frequencies: Vec<f64> = (0..half)
            .map(|pair| base.powf(-2.0 * pair as f64 / dims as f64))
            .collect();
        let mut table = Vec::with_capacity(count);
        for position in 0..positions {
            let angles = frequencies.iter().map(|f| position as f64 * f);
            table.extend(angles.clone().map(|angle| angle.cos() as f32));
            table.extend(angles.map(|angle| angle.sin() as f32));
        }
        if !table.iter().all(|value| value.is_finite()) {
            let rule = "is too small: angles of far positions are not finite";
            return Err(Error::parameter("base", base, rule));
        }
        Self::build(gpu, pairing, dims, positions, &table)
    }

    /// Cosines and sines that the caller has, each `(positions, dims / 2)`: for scaled angles of any kind.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] unless both are of one size, a multiple of `dims / 2`; and as [`new`](Self::new).
    pub fn from_tables(
        gpu: &Gpu,
        pairing: RotaryPairing,
        dims: usize,
        cos: &[f32],
        sin: &[f32],
    ) -> Result<Self> {
        let half = (dims / 2).max(1);
        Self::check(gpu, dims, cos.len() / half)?;
        if !cos.len().is_multiple_of(half) {
            let expected = format!("a multiple of dims / 2 = {half} values");
            return Err(Error::shape("cos", expected, cos.len()));
        }
        if sin.len() != cos.len() {
            let expected = format!("{} values as in cos", cos.len());
            return Err(Error::shape("sin", expected, sin.len()));
        }
        let table: Vec<f32> = cos
            .chunks(half)
            .zip(sin.chunks(half))
            .flat_map(|(cos, sin)| [cos, sin].concat())
            .collect();
        Self::build(gpu, pairing, dims, cos.len() / half, &table)
    }

    /// What must hold of the sizes; the number of values in the table.
    fn check(gpu: &Gpu, dims: usize, positions: usize) -> Result<usize> {
        if dims == 0 || !dims.is_multiple_of(2) {
            let rule = "must be even and at least 2: channels are turned two by two";
            return Err(Error::parameter("dims", dims, rule));
        }
        if positions == 0 {
            return Err(Error::parameter("positions", 0, "must be at least 1"));
        }
        size("dims", dims)?;
        size("positions", positions)?;
        let count = elements("positions * dims", &[positions, dims])?;
        let (needed, available) = (count * 4, gpu.capabilities().max_binding_bytes);
        if needed > available {
            return Err(Error::limit_bytes(
                "the table of angles",
                "max_storage_buffer_binding_size",
                needed,
                available,
            ));
        }
        Ok(count as usize)
    }

    fn build(
        gpu: &Gpu,
        pairing: RotaryPairing,
        dims: usize,
        positions: usize,
        table: &[f32],
    ) -> Result<Self> {
        Ok(Rotary {
            dims,
            pairing,
            positions,
            append: Append::new(gpu, 0)?,
            table: Tensor::from_slice(gpu, &[positions, dims], table)?.view(),
        })
    }

    /// With a kernel of the caller's own that takes the bindings and parameters of `append`, for experiments: of
    /// [`encode`](Self::encode), not of layers and caches.
    ///
    /// # Errors
    ///
    /// [`Error::Parameter`] for a kernel of another operation, [`Error::Shader`] if it is refused.
    pub fn with_kernel(self, kernel: &'static Kernel) -> Result<Self> {
        let append = Append::from_kernel(self.table.gpu(), kernel, 0)?;
        Ok(Rotary { append, ..self })
    }

    /// Channels of a head that are turned (R).
    pub fn dims(&self) -> usize {
        self.dims
    }

    /// Which channels belong together.
    pub fn pairing(&self) -> RotaryPairing {
        self.pairing
    }

    /// Positions that there are angles for.
    pub fn positions(&self) -> usize {
        self.positions
    }

    pub(crate) fn table(&self) -> &TensorView {
        &self.table
    }

    /// [`Error::Parameter`] unless heads of that many channels have enough to turn.
    pub(crate) fn expect_head_dim(&self, head_dim: usize) -> Result<()> {
        if self.dims <= head_dim {
            return Ok(());
        }
        let rule = format!("must be at most head_dim = {head_dim}");
        Err(Error::parameter("dims", self.dims, rule))
    }

    /// [`Error::NoRoom`] unless there are angles for that many positions.
    pub(crate) fn expect_positions(&self, needed: usize) -> Result<()> {
        if needed <= self.positions {
            return Ok(());
        }
        Err(Error::NoRoom {
            what: "rotary embedding".into(),
            needed: needed as u64,
            available: self.positions as u64,
            unit: "positions",
            remedy: "make it with angles for more positions",
        })
    }

    /// Records the rotary embedding of a tensor into an encoder: submits nothing, waits for nothing.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`], [`Error::Type`], [`Error::Layout`], [`Error::OtherDevice`]; [`Error::Parameter`] for heads of
    /// fewer channels than are turned; [`Error::NoRoom`] for positions that there are no angles for. Nothing was
    /// recorded then.
    pub fn encode(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        arguments: RotaryArguments<'_>,
    ) -> Result<()> {
        let RotaryArguments {
            x,
            out,
            first,
            starts,
        } = arguments;
        let &[batch, tokens, _, head_dim] = x.shape() else {
            let got = crate::tensor::shape_text(x.shape());
            return Err(Error::shape("x", "(B, T, heads, D)", got));
        };
        self.expect_head_dim(head_dim)?;
        self.expect_positions(first.saturating_add(tokens))?;
        if let Some(starts) = starts {
            starts.expect_shape("starts", &[batch])?;
            starts.expect_type("starts", ElementType::U32)?;
            crate::operands::expect_contiguous("starts", starts)?;
        }
        let moves = Moves {
            q: Some(("x", x, "out", out)),
            kv: None,
            rotary: Some(self),
            place: Place::Positions { first, starts },
        };
        let ready = self.append.prepare(&moves, batch, tokens)?;
        self.append.record(encoder, ready, "rotary", None)
    }
}
