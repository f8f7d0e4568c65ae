//! Buffers to and from the GPU: allocation, upload, read-back, submission.

use super::Gpu;
use crate::{Error, Result};
use std::collections::VecDeque;
#[cfg(not(target_family = "wasm"))]
use std::sync::mpsc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
#[cfg(not(target_family = "wasm"))]
use std::time::Duration;

/// wgpu copies whole words.
pub(crate) const COPY_ALIGNMENT: u64 = wgpu::COPY_BUFFER_ALIGNMENT;

/// Submissions of [`Gpu::submit`] that may be unfinished at once. Beyond, memory of finished work would pile up.
const MOST_IN_FLIGHT: usize = 32;

/// A lock that a panic elsewhere does not spoil: the data behind each of them is whole at every step.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Turns at a device whose backend has one context for all threads; nothing on other backends.
#[derive(Clone)]
pub(super) struct Turn(Option<Arc<Mutex<()>>>);

impl Turn {
    pub(super) fn new(needed: bool) -> Self {
        Turn(needed.then(Default::default))
    }

    /// Waits for the turn, and holds it until dropped.
    pub(super) fn take(&self) -> Option<MutexGuard<'_, ()>> {
        self.0.as_deref().map(lock)
    }

    /// Waits until a submission is done, without keeping the turn from others meanwhile.
    #[cfg(not(target_family = "wasm"))]
    fn wait(
        &self,
        device: &wgpu::Device,
        submission: wgpu::SubmissionIndex,
    ) -> Result<(), wgpu::PollError> {
        if self.0.is_none() {
            let wait = wgpu::PollType::Wait {
                submission_index: Some(submission),
                timeout: None,
            };
            return device.poll(wait).map(drop);
        }
        loop {
            let look = wgpu::PollType::Wait {
                submission_index: Some(submission.clone()),
                timeout: Some(Duration::ZERO),
            };
            let turn = self.take();
            let result = device.poll(look);
            drop(turn);
            match result {
                Err(wgpu::PollError::Timeout) => std::thread::sleep(Duration::from_micros(200)),
                result => return result.map(drop),
            }
        }
    }
}

/// The last submissions of this crate's own, oldest first.
#[derive(Default)]
pub(super) struct InFlight(Mutex<VecDeque<wgpu::SubmissionIndex>>);

impl Gpu {
    /// Allocates a buffer for `bytes` bytes, rounded up to whole words and to at least one.
    pub(crate) fn allocate(&self, what: &str, bytes: u64) -> Result<wgpu::Buffer> {
        let size = bytes
            .max(COPY_ALIGNMENT)
            .checked_next_multiple_of(COPY_ALIGNMENT)
            .unwrap_or(u64::MAX);
        let available = self.capabilities().max_buffer_bytes;
        if size > available {
            return Err(Error::limit_bytes(what, "max_buffer_size", size, available));
        }
        // A lost device makes buffers without a word: a poll is when wgpu tells of the loss. (A poll runs
        // whatever callbacks are due, so an application's own device is left alone.)
        if self.inner.owned {
            let _turn = self.inner.gl_turn.take();
            let _ = self.device().poll(wgpu::PollType::Poll);
        }
        self.inner.made.count_buffer();
        self.checked(what, size, |device| {
            device.create_buffer(&wgpu::BufferDescriptor {
                label: Some(what),
                size,
                usage: wgpu::BufferUsages::STORAGE
                    | wgpu::BufferUsages::COPY_SRC
                    | wgpu::BufferUsages::COPY_DST,
                mapped_at_creation: false,
            })
        })
    }

    /// Writes `bytes` to the start of `buffer`, before the next submission.
    pub(crate) fn write(
        &self,
        what: &str,
        buffer: &wgpu::Buffer,
        offset: u64,
        bytes: &[u8],
    ) -> Result<()> {
        let whole = bytes.len() - bytes.len() % COPY_ALIGNMENT as usize;
        let (words, rest) = bytes.split_at(whole);
        self.checked(what, bytes.len() as u64, |_| {
            if !words.is_empty() {
                self.queue().write_buffer(buffer, offset, words);
            }
            if !rest.is_empty() {
                let mut last = [0u8; COPY_ALIGNMENT as usize];
                last[..rest.len()].copy_from_slice(rest);
                self.queue()
                    .write_buffer(buffer, offset + whole as u64, &last);
            }
        })
    }

    /// Submits work. Off the web, if 32 submissions made through this crate are unfinished, waits for the
    /// oldest of them first, so that a caller who never waits does not fill the memory.
    ///
    /// # Errors
    ///
    /// [`Error::Validation`] with wgpu's words if the commands are unsound (a caller's own buffer was
    /// destroyed, say), [`Error::DeviceLost`].
    pub fn submit(&self, commands: wgpu::CommandBuffer) -> Result<wgpu::SubmissionIndex> {
        let index = self.checked("submission", 0, |_| self.queue().submit([commands]))?;
        let oldest = {
            let mut in_flight = lock(&self.inner.in_flight.0);
            in_flight.push_back(index.clone());
            if in_flight.len() > MOST_IN_FLIGHT {
                in_flight.pop_front()
            } else {
                None
            }
        };
        if let Some(oldest) = oldest {
            self.wait_for(oldest)?;
        }
        Ok(index)
    }

    /// Records into an encoder of its own and submits; everything wgpu finds wrong with it is an error.
    pub(crate) fn record_and_submit(
        &self,
        record: impl FnOnce(&mut wgpu::CommandEncoder) -> Result<()>,
    ) -> Result<wgpu::SubmissionIndex> {
        let mut encoder = self.device().create_command_encoder(&Default::default());
        record(&mut encoder)?;
        let commands = self.checked("recording", 0, |_| encoder.finish())?;
        self.submit(commands)
    }

    /// Waits until `submission` is done. On the web, where nothing may wait, returns at once.
    ///
    /// # Errors
    ///
    /// [`Error::Parameter`] for a submission of another device, [`Error::DeviceLost`].
    pub fn wait_for(&self, submission: wgpu::SubmissionIndex) -> Result<()> {
        #[cfg(target_family = "wasm")]
        let done = {
            drop(submission);
            Ok(())
        };
        #[cfg(not(target_family = "wasm"))]
        let done = self.inner.gl_turn.wait(self.device(), submission);
        match done {
            Ok(()) => self.alive(),
            Err(wgpu::PollError::WrongSubmissionIndex(asked, last)) => Err(Error::parameter(
                "submission",
                asked,
                format!("must be of this device, whose last submission is {last}"),
            )),
            Err(error) => Err(self.lost(error.to_string())),
        }
    }

    pub(crate) fn lost(&self, words: String) -> Error {
        match self.alive() {
            Err(error) => error,
            Ok(()) => Error::DeviceLost { reason: words },
        }
    }

    /// Copies `bytes` bytes of `buffer` from `offset` (a multiple of 4) to the host, after all work submitted so far.
    pub(crate) async fn read(
        &self,
        buffer: &wgpu::Buffer,
        offset: u64,
        bytes: u64,
    ) -> Result<Vec<u8>> {
        if bytes == 0 {
            return Ok(Vec::new());
        }
        let size = bytes.next_multiple_of(COPY_ALIGNMENT);
        let (sender, receiver) = futures_channel::oneshot::channel();
        let (staging, index) = self.checked("read-back", size, |device| {
            self.inner.made.count_buffer();
            let staging = device.create_buffer(&wgpu::BufferDescriptor {
                label: Some("wgpu-attention: read-back"),
                size,
                usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
                mapped_at_creation: false,
            });
            let mut encoder = device.create_command_encoder(&Default::default());
            encoder.copy_buffer_to_buffer(buffer, offset, &staging, 0, size);
            let index = self.queue().submit([encoder.finish()]);
            staging.map_async(wgpu::MapMode::Read, .., move |result| {
                // Whoever awaited may have given up: then nobody is told.
                let _ = sender.send(result);
            });
            (staging, index)
        })?;
        #[cfg(not(target_family = "wasm"))]
        self.inner.poller.watch(index)?;
        #[cfg(target_family = "wasm")]
        drop(index);
        match receiver.await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return Err(self.lost(error.to_string())),
            Err(_) => return Err(self.lost("a read-back was dropped unfinished".into())),
        }
        let _turn = self.inner.gl_turn.take();
        let mapped = staging
            .get_mapped_range(..)
            .map_err(|error| self.lost(error.to_string()))?;
        let mut host = mapped.to_vec();
        host.truncate(bytes as usize);
        Ok(host)
    }
}

/// A thread that waits for submissions, so that a future which awaits a read-back needs neither a busy loop
/// nor an executor that may be blocked. Started by the first read-back; ended, and waited for, with the last
/// [`Gpu`]: a driver that is unloaded while a thread still holds its device crashes.
#[cfg(not(target_family = "wasm"))]
pub(super) struct Poller {
    device: wgpu::Device,
    turn: Turn,
    thread: Mutex<Option<Thread>>,
}

#[cfg(not(target_family = "wasm"))]
struct Thread {
    submissions: mpsc::Sender<wgpu::SubmissionIndex>,
    handle: std::thread::JoinHandle<()>,
}

#[cfg(not(target_family = "wasm"))]
impl Poller {
    pub(super) fn new(device: wgpu::Device, turn: Turn) -> Self {
        Poller {
            device,
            turn,
            thread: Mutex::new(None),
        }
    }

    /// Sees to it that the callbacks of `submission` are called when it is done.
    fn watch(&self, submission: wgpu::SubmissionIndex) -> Result<()> {
        let mut slot = lock(&self.thread);
        let thread = match slot.take() {
            Some(thread) => thread,
            None => self.start()?,
        };
        let thread = match thread.submissions.send(submission) {
            Ok(()) => thread,
            // The thread is gone, which only a panic in its device's callbacks can do: start another.
            Err(mpsc::SendError(submission)) => {
                let thread = self.start()?;
                let _ = thread.submissions.send(submission);
                thread
            }
        };
        *slot = Some(thread);
        Ok(())
    }

    fn start(&self) -> Result<Thread> {
        let (sender, submissions) = mpsc::channel();
        let (device, turn) = (self.device.clone(), self.turn.clone());
        let handle = std::thread::Builder::new()
            .name("wgpu-attention poller".into())
            .spawn(move || {
                for submission in submissions {
                    // An error means that the device is gone: its callbacks then say so themselves.
                    let _ = turn.wait(&device, submission);
                }
            })
            .map_err(|error| Error::Unsupported {
                what: "reading back".into(),
                reason: format!("no thread could be started that waits for the GPU: {error}"),
            })?;
        Ok(Thread {
            submissions: sender,
            handle,
        })
    }
}

#[cfg(not(target_family = "wasm"))]
impl Drop for Poller {
    fn drop(&mut self) {
        let thread = lock(&self.thread).take();
        if let Some(Thread {
            submissions,
            handle,
        }) = thread
        {
            drop(submissions);
            // The last `Gpu` may be dropped by what a finished read-back woke, on this very thread.
            if handle.thread().id() != std::thread::current().id() {
                let _ = handle.join();
            }
        }
    }
}
