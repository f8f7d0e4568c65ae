//! Times of passes by the GPU's own clock.

use super::Gpu;
use crate::{Error, Result};

/// The time that one pass took on the GPU.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// The pass.
    pub label: String,
    /// Its duration in seconds.
    pub seconds: f64,
}

/// Timestamps around compute passes: give [`writes`](Self::writes) to each pass, [`resolve`](Self::resolve)
/// into the same encoder, submit, then [`read`](Self::read).
#[derive(Debug)]
pub struct Timestamps {
    gpu: Gpu,
    queries: wgpu::QuerySet,
    resolved: wgpu::Buffer,
    labels: Vec<String>,
    capacity: u32,
}

impl Timestamps {
    /// Room for `passes` passes.
    ///
    /// # Errors
    ///
    /// [`Error::MissingFeature`] where the device has no timestamps; [`Error::Parameter`] if `passes` is 0 or over 2048.
    pub fn new(gpu: &Gpu, passes: u32) -> Result<Self> {
        if !gpu.capabilities().timestamps {
            return Err(Error::MissingFeature {
                what: "timing on the GPU".into(),
                feature: "TIMESTAMP_QUERY".into(),
                adapter: gpu.adapter_info().name.clone(),
            });
        }
        // wgpu allows 4096 queries in a set.
        if !(1..=wgpu::QUERY_SET_MAX_QUERIES / 2).contains(&passes) {
            return Err(Error::parameter("passes", passes, "must be 1 to 2048"));
        }
        let size = u64::from(passes) * 2 * u64::from(wgpu::QUERY_SIZE);
        let (queries, resolved) = gpu.checked("timestamps", size, |device| {
            let queries = device.create_query_set(&wgpu::QuerySetDescriptor {
                label: Some("wgpu-attention: timestamps"),
                ty: wgpu::QueryType::Timestamp,
                count: passes * 2,
            });
            let resolved = device.create_buffer(&wgpu::BufferDescriptor {
                label: Some("wgpu-attention: timestamps"),
                size,
                usage: wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC,
                mapped_at_creation: false,
            });
            (queries, resolved)
        })?;
        Ok(Timestamps {
            gpu: gpu.clone(),
            queries,
            resolved,
            labels: Vec::new(),
            capacity: passes,
        })
    }

    /// What the next pass is to be begun with. That pass must be recorded: a driver may wait for ever for a
    /// timestamp that nobody writes.
    ///
    /// # Errors
    ///
    /// [`Error::LimitExceeded`] when the room is used up.
    pub fn writes(&mut self, label: &str) -> Result<wgpu::ComputePassTimestampWrites<'_>> {
        self.expect_room(1)?;
        let number = self.labels.len() as u32;
        self.labels.push(label.to_string());
        Ok(wgpu::ComputePassTimestampWrites {
            query_set: &self.queries,
            beginning_of_pass_write_index: Some(2 * number),
            end_of_pass_write_index: Some(2 * number + 1),
        })
    }

    /// [`Error::LimitExceeded`] if there is no room for that many passes more.
    pub(crate) fn expect_room(&self, passes: usize) -> Result<()> {
        let needed = self.labels.len() + passes;
        if needed <= self.capacity as usize {
            return Ok(());
        }
        Err(Error::LimitExceeded {
            what: "timing".into(),
            limit: "the room of Timestamps::new".into(),
            needed: needed as u64,
            available: u64::from(self.capacity),
            unit: "passes",
        })
    }

    /// Records that the timestamps of the passes before are to be kept.
    pub fn resolve(&self, encoder: &mut wgpu::CommandEncoder) {
        let used = 2 * self.labels.len() as u32;
        if used > 0 {
            encoder.resolve_query_set(&self.queries, 0..used, &self.resolved, 0);
        }
    }

    /// The spans of the passes, in the order of [`writes`](Self::writes), once the work was submitted. The room
    /// is free again afterwards.
    ///
    /// # Errors
    ///
    /// [`Error::DeviceLost`]. A span whose end lies before its beginning (some drivers) is
    /// [`Error::Unsupported`], never a negative or wrapped time.
    pub async fn read(&mut self) -> Result<Vec<Span>> {
        let labels = std::mem::take(&mut self.labels);
        // Read in a submission of its own: resolved and copied in one encoder, some drivers give 0.
        let bytes = 2 * labels.len() as u64 * u64::from(wgpu::QUERY_SIZE);
        let raw = self.gpu.read(&self.resolved, 0, bytes).await?;
        let ticks: Vec<u64> = bytemuck::pod_collect_to_vec(&raw);
        let period = f64::from(self.gpu.queue().get_timestamp_period()) * 1e-9;
        labels
            .into_iter()
            .zip(ticks.chunks_exact(2))
            .map(|(label, ends)| match ends[1].checked_sub(ends[0]) {
                Some(passed) => Ok(Span {
                    label,
                    seconds: passed as f64 * period,
                }),
                None => Err(Error::Unsupported {
                    what: "timing on the GPU".into(),
                    reason: format!("the driver's clock ran backwards over {label}; use wall time"),
                }),
            })
            .collect()
    }

    /// [`read`](Self::read), waiting on this thread.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read).
    #[cfg(not(target_family = "wasm"))]
    pub fn read_blocking(&mut self) -> Result<Vec<Span>> {
        pollster::block_on(self.read())
    }
}
