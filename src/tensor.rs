//! Tensors on the GPU, and views of them.
//!
//! A [`Tensor`] owns a buffer and is contiguous (row-major). A [`TensorView`] is a window on one: shape,
//! strides and offset, all in elements; making one copies nothing. Both keep the buffer alive and are cheap
//! to clone.

use crate::element::{Element, ElementType};
use crate::gpu::{Bound, Gpu};
use crate::{Error, Result};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// A buffer on one `Gpu`.
struct Storage {
    gpu: Gpu,
    buffer: wgpu::Buffer,
    /// What this crate allocated for it: 0 for a caller's own buffer.
    allocated: u64,
}

impl Drop for Storage {
    fn drop(&mut self) {
        self.gpu.forget(&self.buffer);
        self.gpu.note_freed(self.allocated);
    }
}

/// A contiguous (row-major) array on the GPU.
#[derive(Clone)]
pub struct Tensor {
    view: TensorView,
}

/// A window on a tensor's buffer: shape, strides and offset in elements. Copies nothing, keeps the buffer alive.
#[derive(Clone)]
pub struct TensorView {
    storage: Arc<Storage>,
    element_type: ElementType,
    offset: usize,
    shape: Vec<usize>,
    strides: Vec<usize>,
}

/// `(2, 3, 4)`
pub(crate) fn shape_text(shape: &[usize]) -> String {
    let sizes: Vec<String> = shape.iter().map(usize::to_string).collect();
    format!("({})", sizes.join(", "))
}

/// Elements of a shape; an error if there are more than memory can hold.
pub(crate) fn elements(what: &str, shape: &[usize]) -> Result<u64> {
    // A zero anywhere makes it empty, however large the rest.
    if shape.contains(&0) {
        return Ok(0);
    }
    shape
        .iter()
        .try_fold(1u64, |product, size| product.checked_mul(*size as u64))
        .filter(|count| *count <= i64::MAX as u64 / 8)
        .ok_or_else(|| Error::shape(what, "at most 2^60 elements", shape_text(shape)))
}

fn contiguous_strides(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1usize; shape.len()];
    for axis in (1..shape.len()).rev() {
        // Only an empty tensor has sizes whose product does not fit: its strides are never used.
        strides[axis - 1] = strides[axis].saturating_mul(shape[axis].max(1));
    }
    strides
}

impl Tensor {
    /// A tensor of this shape; what it holds at first is zero. Allocates on the GPU.
    ///
    /// # Errors
    ///
    /// [`Error::LimitExceeded`] if the device's buffers are not that large, [`Error::OutOfMemory`],
    /// [`Error::DeviceLost`].
    pub fn empty(gpu: &Gpu, shape: &[usize], element_type: ElementType) -> Result<Self> {
        let bytes = elements("shape", shape)? * element_type.size();
        let buffer = gpu.allocate("tensor", bytes)?;
        let allocated = buffer.size();
        gpu.note_allocated(allocated);
        Ok(Self::new(gpu, buffer, allocated, 0, shape, element_type))
    }

    /// A tensor that holds `values` in row-major order. The upload happens before the next submission; until then
    /// wgpu holds a copy of the values on the host.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] if `values` has not as many elements as the shape, and as [`empty`](Self::empty).
    pub fn from_slice<T: Element>(gpu: &Gpu, shape: &[usize], values: &[T]) -> Result<Self> {
        let expected = elements("shape", shape)?;
        if expected != values.len() as u64 {
            return Err(Error::shape(
                "values",
                format!("{expected} elements for the shape {}", shape_text(shape)),
                values.len(),
            ));
        }
        let tensor = Self::empty(gpu, shape, T::TYPE)?;
        tensor.write(values)?;
        Ok(tensor)
    }

    /// A tensor in a buffer of the caller's own, `offset` bytes from its start. Nothing is copied.
    ///
    /// The buffer must belong to the same device as `gpu` (one of another device is an error when it is used,
    /// but one of another `wgpu::Instance` makes wgpu itself panic), have the usage `STORAGE` (and `COPY_SRC` to be
    /// read back, `COPY_DST` to be written), and a length that is a multiple of 4. Do not destroy it while it is in use
    /// here: what was bound once is found again, and wgpu would only say so at the submission.
    ///
    /// # Errors
    ///
    /// [`Error::Layout`] for a missing usage or a misaligned offset or size, [`Error::Shape`] if the buffer is too short.
    pub fn from_buffer(
        gpu: &Gpu,
        buffer: wgpu::Buffer,
        offset: u64,
        shape: &[usize],
        element_type: ElementType,
    ) -> Result<Self> {
        if !buffer.usage().contains(wgpu::BufferUsages::STORAGE) {
            return Err(Error::Layout {
                argument: "buffer".into(),
                problem: format!("its usage is {:?}, without STORAGE", buffer.usage()),
                remedy: "create it with BufferUsages::STORAGE".into(),
            });
        }
        if !offset.is_multiple_of(element_type.size()) || !buffer.size().is_multiple_of(4) {
            return Err(Error::Layout {
                argument: "buffer".into(),
                problem: format!("offset {offset} in a buffer of {} bytes", buffer.size()),
                remedy: format!(
                    "the offset must be a multiple of {} (one {element_type}), the buffer's size a multiple of 4",
                    element_type.size()
                ),
            });
        }
        let bytes = elements("shape", shape)? * element_type.size();
        if offset
            .checked_add(bytes)
            .is_none_or(|end| end > buffer.size())
        {
            return Err(Error::shape(
                "buffer",
                format!("at least {bytes} bytes from offset {offset}"),
                format!("{} bytes in all", buffer.size()),
            ));
        }
        let first = (offset / element_type.size()) as usize;
        Ok(Self::new(gpu, buffer, 0, first, shape, element_type))
    }

    fn new(
        gpu: &Gpu,
        buffer: wgpu::Buffer,
        allocated: u64,
        offset: usize,
        shape: &[usize],
        element_type: ElementType,
    ) -> Self {
        Tensor {
            view: TensorView {
                storage: Arc::new(Storage {
                    gpu: gpu.clone(),
                    buffer,
                    allocated,
                }),
                element_type,
                offset,
                shape: shape.to_vec(),
                strides: contiguous_strides(shape),
            },
        }
    }

    /// The whole of it as a view.
    pub fn view(&self) -> TensorView {
        self.view.clone()
    }

    /// Sizes of the axes.
    pub fn shape(&self) -> &[usize] {
        &self.view.shape
    }

    /// The type of the elements.
    pub fn element_type(&self) -> ElementType {
        self.view.element_type
    }

    /// The buffer it lies in.
    pub fn buffer(&self) -> &wgpu::Buffer {
        &self.view.storage.buffer
    }

    /// Overwrites all elements, in row-major order, before the next submission.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] if `values` is not as long as the tensor, [`Error::Type`] if it has another element
    /// type, [`Error::Layout`] if the tensor lies at an odd place in a caller's buffer, [`Error::Validation`]
    /// if such a buffer cannot be written.
    pub fn write<T: Element>(&self, values: &[T]) -> Result<()> {
        self.view.check_type::<T>("values")?;
        let expected = self.view.elements();
        if values.len() as u64 != expected {
            return Err(Error::shape(
                "values",
                format!("{expected} elements"),
                values.len(),
            ));
        }
        let offset = self.view.offset as u64 * self.element_type().size();
        let bytes = T::to_bytes(values);
        let whole_words = offset.is_multiple_of(4) && bytes.len().is_multiple_of(4);
        let callers_own = self.view.storage.allocated == 0;
        if callers_own && !whole_words {
            return Err(Error::Layout {
                argument: "tensor".into(),
                problem: format!(
                    "{} bytes at offset {offset} of a caller's buffer",
                    bytes.len()
                ),
                remedy: "only whole 4-byte words can be written without touching what lies beside"
                    .into(),
            });
        }
        let gpu = &self.view.storage.gpu;
        gpu.write("tensor", &self.view.storage.buffer, offset, &bytes)
    }

    /// Copies all elements to the host, after the work that was submitted before.
    ///
    /// # Errors
    ///
    /// [`Error::Type`] if the tensor has another element type, [`Error::OutOfMemory`], [`Error::DeviceLost`].
    pub async fn read<T: Element>(&self) -> Result<Vec<T>> {
        self.view.read().await
    }

    /// [`read`](Self::read), waiting on this thread.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read).
    #[cfg(not(target_family = "wasm"))]
    pub fn read_blocking<T: Element>(&self) -> Result<Vec<T>> {
        pollster::block_on(self.read())
    }

    /// The same elements under another shape.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] if it has another number of elements.
    pub fn reshape(&self, shape: &[usize]) -> Result<Tensor> {
        let (expected, got) = (self.view.elements(), elements("shape", shape)?);
        if expected != got {
            return Err(Error::shape(
                "shape",
                format!("{expected} elements as in {}", shape_text(self.shape())),
                format!("{got} in {}", shape_text(shape)),
            ));
        }
        Ok(Tensor {
            view: TensorView {
                shape: shape.to_vec(),
                strides: contiguous_strides(shape),
                ..self.view.clone()
            },
        })
    }
}

impl TensorView {
    /// Sizes of the axes.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Elements between neighbours along each axis.
    pub fn strides(&self) -> &[usize] {
        &self.strides
    }

    /// Elements before the first one, from the start of the buffer.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// The type of the elements.
    pub fn element_type(&self) -> ElementType {
        self.element_type
    }

    /// The buffer it lies in.
    pub fn buffer(&self) -> &wgpu::Buffer {
        &self.storage.buffer
    }

    /// The GPU it lies on.
    pub fn gpu(&self) -> &Gpu {
        &self.storage.gpu
    }

    /// Indices `range` of one axis.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] if there is no such axis, or the range does not lie in it.
    pub fn slice(&self, axis: usize, range: Range<usize>) -> Result<TensorView> {
        let size = self.axis(axis)?;
        if range.start > range.end || range.end > size {
            return Err(Error::shape(
                format!("range of axis {axis}"),
                format!("within 0..{size}"),
                format!("{range:?}"),
            ));
        }
        let mut view = self.clone();
        view.shape[axis] = range.end - range.start;
        // Saturates in an empty tensor only, where nothing is ever addressed.
        let skipped = range.start.saturating_mul(self.strides[axis]);
        view.offset = view.offset.saturating_add(skipped);
        Ok(view)
    }

    /// One axis as several, the last of them fastest: `(B, T, H*D)` as `(B, T, H, D)`.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] if there is no such axis, or the product of `sizes` is not its size.
    pub fn split_axis(&self, axis: usize, sizes: &[usize]) -> Result<TensorView> {
        let size = self.axis(axis)?;
        if elements("sizes", sizes)? != size as u64 || sizes.is_empty() {
            return Err(Error::shape(
                format!("sizes of axis {axis}"),
                format!("a product of {size}"),
                shape_text(sizes),
            ));
        }
        let inner = contiguous_strides(sizes);
        let stride = self.strides[axis];
        let mut view = self.clone();
        view.shape.splice(axis..=axis, sizes.iter().copied());
        view.strides
            .splice(axis..=axis, inner.iter().map(|s| s.saturating_mul(stride)));
        Ok(view)
    }

    /// The axes in another order: axis `i` of the result is axis `order[i]` of this view.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] if `order` does not name each axis once.
    pub fn permute(&self, order: &[usize]) -> Result<TensorView> {
        let mut sorted = order.to_vec();
        sorted.sort_unstable();
        if sorted != (0..self.shape.len()).collect::<Vec<_>>() {
            return Err(Error::shape(
                "order",
                format!("each of 0..{} once", self.shape.len()),
                format!("{order:?}"),
            ));
        }
        let mut view = self.clone();
        view.shape = order.iter().map(|axis| self.shape[*axis]).collect();
        view.strides = order.iter().map(|axis| self.strides[*axis]).collect();
        Ok(view)
    }

    /// Copies the elements to the host in row-major order of this view, after the work that was submitted before.
    ///
    /// # Errors
    ///
    /// As [`Tensor::read`].
    pub async fn read<T: Element>(&self) -> Result<Vec<T>> {
        self.check_type::<T>("tensor")?;
        if self.elements() == 0 {
            return Ok(Vec::new());
        }
        let size = T::TYPE.size();
        let (begin, end) = (self.offset as u64, self.offset as u64 + self.span());
        let aligned = begin * size / 4 * 4;
        let lead = ((begin * size - aligned) / size) as usize;
        let bytes = self
            .gpu()
            .read(self.buffer(), aligned, end * size - aligned)
            .await?;
        let flat = T::from_bytes(&bytes);
        if self.strides == contiguous_strides(&self.shape) && lead == 0 {
            return Ok(flat);
        }
        let mut index = vec![0usize; self.shape.len()];
        let mut values = Vec::new();
        let count = usize::try_from(self.elements()).unwrap_or(usize::MAX);
        values
            .try_reserve_exact(count)
            .map_err(|_| Error::OutOfMemory {
                what: format!("a copy on the host of the view {self:?}"),
                bytes: self.elements().saturating_mul(size),
            })?;
        'all: loop {
            let place: usize = index.iter().zip(&self.strides).map(|(i, s)| i * s).sum();
            values.push(flat[lead + place]);
            for axis in (0..index.len()).rev() {
                index[axis] += 1;
                if index[axis] < self.shape[axis] {
                    continue 'all;
                }
                index[axis] = 0;
            }
            return Ok(values);
        }
    }

    /// [`read`](Self::read), waiting on this thread.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read).
    #[cfg(not(target_family = "wasm"))]
    pub fn read_blocking<T: Element>(&self) -> Result<Vec<T>> {
        pollster::block_on(self.read())
    }

    /// How many elements it has.
    pub fn elements(&self) -> u64 {
        if self.shape.contains(&0) {
            return 0;
        }
        // A broadcast view may have more elements than can be counted.
        let sizes = self.shape.iter().map(|size| *size as u64);
        sizes.fold(1, u64::saturating_mul)
    }

    /// The view repeated to another shape, aligned at the last axis as numpy does: an axis of 1, and one that is not
    /// there, becomes any size. Nothing is copied: such an axis has a stride of 0.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] if it does not fit.
    pub fn broadcast_to(&self, shape: &[usize]) -> Result<TensorView> {
        self.broadcast_as("shape", shape)
    }

    /// [`broadcast_to`](Self::broadcast_to), for the argument of that name.
    pub(crate) fn broadcast_as(&self, argument: &str, shape: &[usize]) -> Result<TensorView> {
        let unfit = || {
            Error::shape(
                argument,
                format!(
                    "a shape that broadcasts to {} (each axis full or 1, aligned at the last)",
                    shape_text(shape)
                ),
                shape_text(&self.shape),
            )
        };
        let missing = shape
            .len()
            .checked_sub(self.shape.len())
            .ok_or_else(unfit)?;
        let mut view = self.clone();
        view.shape = shape.to_vec();
        view.strides = vec![0; shape.len()];
        for (axis, size) in self.shape.iter().enumerate() {
            if *size == shape[missing + axis] {
                view.strides[missing + axis] = self.strides[axis];
            } else if *size != 1 {
                return Err(unfit());
            }
        }
        Ok(view)
    }

    /// With an axis of 1 in front of axis `axis` (or behind the last).
    pub(crate) fn unsqueeze(&self, axis: usize) -> TensorView {
        let mut view = self.clone();
        let axis = axis.min(view.shape.len());
        view.shape.insert(axis, 1);
        view.strides.insert(axis, 0);
        view
    }

    /// Neighbouring axes as one: an image `(B, C, height, width)` as `(B, C, height * width)`.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] if there are no such axes, [`Error::Layout`] if they do not follow one another in memory.
    pub fn merge_axes(&self, axes: Range<usize>) -> Result<TensorView> {
        if axes.start >= axes.end || axes.end > self.shape.len() {
            return Err(Error::shape(
                "axes",
                format!("some of 0..{}", self.shape.len()),
                format!("{axes:?}"),
            ));
        }
        let merged = elements("axes", &self.shape[axes.clone()])? as usize;
        // Axes of 1 are never stepped along.
        let long: Vec<usize> = axes.clone().filter(|axis| self.shape[*axis] > 1).collect();
        let apart = long.windows(2).any(|pair| {
            self.strides[pair[0]] != self.strides[pair[1]].saturating_mul(self.shape[pair[1]])
        });
        if apart && merged > 0 {
            return Err(Error::Layout {
                argument: "axes".into(),
                problem: format!(
                    "axes {axes:?} do not follow one another in memory (shape {}, strides {})",
                    shape_text(&self.shape),
                    shape_text(&self.strides)
                ),
                remedy: "copy the view to a tensor of its own first".into(),
            });
        }
        let stride = long.last().map_or(1, |axis| self.strides[*axis]);
        let mut view = self.clone();
        view.shape.splice(axes.clone(), [merged]);
        view.strides.splice(axes, [stride]);
        Ok(view)
    }

    /// An image `(B, C, height, width)` as `(B, height * width, C)`: its pixels are tokens, row after row. Nothing is
    /// copied; a layer reads and writes such a view as it lies.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] unless it has four axes, [`Error::Layout`] if rows do not follow one another in memory.
    pub fn image_tokens(&self) -> Result<TensorView> {
        if self.shape.len() != 4 {
            let expected = "an image (B, C, height, width)";
            return Err(Error::shape("image", expected, shape_text(&self.shape)));
        }
        self.merge_axes(2..4)?.permute(&[0, 2, 1])
    }

    /// Whether the elements lie one behind the other, in row-major order.
    pub fn is_contiguous(&self) -> bool {
        let expected = contiguous_strides(&self.shape);
        let mut axes = self.shape.iter().zip(self.strides.iter().zip(expected));
        self.elements() == 0
            || axes.all(|(size, (stride, expected))| *size <= 1 || *stride == expected)
    }

    /// 32-bit words of the same buffer, from that one on.
    pub(crate) fn words(&self, offset: usize, count: usize) -> TensorView {
        TensorView {
            storage: self.storage.clone(),
            element_type: ElementType::U32,
            offset,
            shape: vec![count],
            strides: vec![1],
        }
    }

    /// [`Error::Shape`] unless that axis has that size.
    pub(crate) fn expect_axis(&self, argument: &str, axis: usize, size: usize) -> Result<()> {
        if self.shape.get(axis) == Some(&size) {
            return Ok(());
        }
        Err(Error::shape(
            argument,
            format!("{size} along axis {axis}"),
            shape_text(&self.shape),
        ))
    }

    fn axis(&self, axis: usize) -> Result<usize> {
        self.shape.get(axis).copied().ok_or_else(|| {
            Error::shape(
                "axis",
                format!(
                    "below {} for the shape {}",
                    self.shape.len(),
                    shape_text(&self.shape)
                ),
                axis,
            )
        })
    }

    fn check_type<T: Element>(&self, argument: &str) -> Result<()> {
        self.expect_type(argument, T::TYPE)
    }

    /// [`Error::Type`] unless the elements have that type.
    pub(crate) fn expect_type(&self, argument: &str, expected: ElementType) -> Result<()> {
        if self.element_type == expected {
            return Ok(());
        }
        Err(Error::Type {
            argument: argument.into(),
            expected: expected.to_string(),
            got: self.element_type.to_string(),
        })
    }

    /// [`Error::Shape`] unless it has exactly that shape.
    pub(crate) fn expect_shape(&self, argument: &str, expected: &[usize]) -> Result<()> {
        if self.shape == expected {
            return Ok(());
        }
        Err(Error::shape(
            argument,
            shape_text(expected),
            shape_text(&self.shape),
        ))
    }

    /// [`Error::OtherDevice`] unless it lies on that GPU.
    pub(crate) fn expect_gpu(&self, argument: &str, gpu: &Gpu) -> Result<()> {
        if self.gpu().same_as(gpu) {
            return Ok(());
        }
        Err(Error::OtherDevice {
            argument: argument.into(),
            ours: gpu.adapter_info().name.clone(),
            theirs: self.gpu().adapter_info().name.clone(),
        })
    }

    /// Elements from the first to one past the last.
    fn span(&self) -> u64 {
        if self.elements() == 0 {
            return 0;
        }
        let last: u64 = self
            .shape
            .iter()
            .zip(&self.strides)
            .map(|(size, stride)| (*size as u64 - 1) * *stride as u64)
            .sum();
        last + 1
    }

    /// Whether no two indices share an element: what a kernel may write to.
    pub(crate) fn is_injective(&self) -> bool {
        if self.elements() == 0 {
            return true;
        }
        let mut axes: Vec<(usize, usize)> = self
            .strides
            .iter()
            .copied()
            .zip(self.shape.iter().copied())
            .filter(|(_, size)| *size > 1)
            .collect();
        axes.sort_unstable();
        let mut reach = 0;
        axes.into_iter().all(|(stride, size)| {
            let apart = stride > reach;
            reach += stride * (size - 1);
            apart
        })
    }

    /// How the view is bound: `None` if it is empty.
    ///
    /// The offset is rounded down to what the device wants and the rest is passed to the kernel, so that a
    /// view may begin anywhere.
    pub(crate) fn bind(&self, argument: &str) -> Result<Option<Bound>> {
        let span = self.span();
        if span == 0 {
            return Ok(None);
        }
        let capabilities = self.gpu().capabilities();
        let size = self.element_type.size();
        let begin = self.offset as u64 * size;
        let offset = begin / capabilities.storage_alignment * capabilities.storage_alignment;
        let bytes = (begin - offset + span * size).next_multiple_of(4);
        let exceeded = |limit: &str, available| {
            Err(Error::limit_bytes(
                format!("binding {argument}"),
                limit,
                bytes,
                available,
            ))
        };
        if bytes > capabilities.max_binding_bytes {
            return exceeded(
                "max_storage_buffer_binding_size",
                capabilities.max_binding_bytes,
            );
        }
        // Kernels count elements in u32.
        if bytes / size > u64::from(u32::MAX) {
            return exceeded("32-bit indexing", u64::from(u32::MAX) * size);
        }
        Ok(Some(Bound {
            offset,
            size: bytes,
            first: ((begin - offset) / size) as u32,
        }))
    }

    /// The stride of an axis as kernels take it. (0 where the axis is never stepped along, so that a
    /// stride which does not fit cannot matter.)
    pub(crate) fn stride(&self, axis: usize) -> u32 {
        if self.shape[axis] <= 1 {
            return 0;
        }
        self.strides[axis] as u32
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Tensor {} {}",
            self.element_type(),
            shape_text(self.shape())
        )
    }
}

impl fmt::Debug for TensorView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "TensorView {} {} strides {} offset {}",
            self.element_type,
            shape_text(&self.shape),
            shape_text(&self.strides),
            self.offset
        )
    }
}
