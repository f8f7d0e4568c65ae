//! The way of values between a case, where all are f64, and the GPU.

use crate::tensor::{Tensor, TensorView};
use crate::tensor_file::{ElementKind, FileTensor};
use crate::{ElementType, Error, Gpu, Result};
use half::{bf16, f16};

/// Values with their shape, row-major.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Values {
    pub(super) shape: Vec<usize>,
    pub(super) values: Vec<f64>,
}

impl From<&FileTensor> for Values {
    fn from(tensor: &FileTensor) -> Self {
        Values {
            shape: tensor.shape.clone(),
            values: tensor.values.clone(),
        }
    }
}

impl Values {
    /// Lengths or starts, one behind the other.
    pub(super) fn list(lengths: &[usize]) -> Self {
        Values {
            shape: vec![lengths.len()],
            values: lengths.iter().map(|length| *length as f64).collect(),
        }
    }

    /// A mask: 1 where not 0.
    ///
    /// # Errors
    ///
    /// [`Error::Type`] for floats.
    pub(super) fn mask(tensor: &FileTensor) -> Result<Self> {
        let values = tensor.to_bool()?.into_iter().map(f64::from);
        Ok(Values {
            shape: tensor.shape.clone(),
            values: values.collect(),
        })
    }

    /// As a tensor of that type.
    pub(super) fn upload(&self, gpu: &Gpu, element_type: ElementType) -> Result<Tensor> {
        let (shape, values) = (&self.shape[..], self.values.iter());
        match element_type {
            ElementType::F32 => {
                Tensor::from_slice(gpu, shape, &values.map(|v| *v as f32).collect::<Vec<_>>())
            }
            ElementType::F16 => {
                let values: Vec<f16> = values.map(|v| f16::from_f64(*v)).collect();
                Tensor::from_slice(gpu, shape, &values)
            }
            ElementType::BF16 => {
                let values: Vec<bf16> = values.map(|v| bf16::from_f64(*v)).collect();
                Tensor::from_slice(gpu, shape, &values)
            }
            ElementType::Bool => {
                Tensor::from_slice(gpu, shape, &values.map(|v| *v != 0.0).collect::<Vec<_>>())
            }
            ElementType::U32 => {
                Tensor::from_slice(gpu, shape, &values.map(|v| *v as u32).collect::<Vec<_>>())
            }
        }
    }
}

/// The elements of a view, read back.
pub(super) fn download(view: &TensorView) -> Result<Vec<f64>> {
    Ok(match view.element_type() {
        ElementType::F32 => view
            .read_blocking::<f32>()?
            .into_iter()
            .map(f64::from)
            .collect(),
        ElementType::F16 => view
            .read_blocking::<f16>()?
            .into_iter()
            .map(f64::from)
            .collect(),
        ElementType::BF16 => view
            .read_blocking::<bf16>()?
            .into_iter()
            .map(f64::from)
            .collect(),
        other => {
            return Err(Error::Type {
                argument: "output".into(),
                expected: "f32, f16 or bf16".into(),
                got: other.to_string(),
            });
        }
    })
}

/// The type that a tensor of a case is stored in on the GPU. Those of f64 hold f32 values.
pub(super) fn stored_type(tensor: &FileTensor) -> Result<ElementType> {
    match tensor.dtype {
        ElementKind::F32 | ElementKind::F64 => Ok(ElementType::F32),
        ElementKind::F16 => Ok(ElementType::F16),
        ElementKind::BF16 => Ok(ElementType::BF16),
        other => Err(Error::Type {
            argument: tensor.name.clone(),
            expected: "a float type".into(),
            got: other.to_string(),
        }),
    }
}
