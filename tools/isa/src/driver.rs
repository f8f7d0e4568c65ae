//! The driver: which GPU it is told to compile for, and one pipeline after the other.

use crate::spirv::Shader;
use ash::{khr, vk};
use std::ffi::{CStr, CString};
use std::path::{Path, PathBuf};

/// Where a system keeps the descriptions of its Vulkan drivers.
const FOLDERS: [&str; 3] = [
    "/usr/share/vulkan/icd.d",
    "/etc/vulkan/icd.d",
    "/usr/local/share/vulkan/icd.d",
];

/// A compiled kernel, as the driver describes it.
#[derive(Debug)]
pub(crate) struct Compiled {
    /// Invocations of a wave.
    pub(crate) wave: u32,
    /// What the driver counts, by its own names.
    statistics: Vec<(String, u64)>,
    /// The listing.
    pub(crate) assembly: String,
}

impl Compiled {
    /// A figure of the driver's.
    ///
    /// # Errors
    ///
    /// If this driver has none of that name: nothing may be read as zero that was not said.
    pub(crate) fn statistic(&self, name: &str) -> Result<u64, String> {
        self.statistics
            .iter()
            .find(|(other, _)| other == name)
            .map(|(_, value)| *value)
            .ok_or_else(|| format!("the driver does not report {name:?}"))
    }
}

/// The description of the system's RADV driver (a file `radeon_icd*.json`).
pub(crate) fn find_icd() -> Option<PathBuf> {
    FOLDERS.iter().find_map(|folder| {
        let mut files: Vec<PathBuf> = std::fs::read_dir(folder)
            .ok()?
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| {
                let name = path.file_name().and_then(|name| name.to_str());
                name.is_some_and(|name| name.starts_with("radeon_icd") && name.ends_with(".json"))
            })
            .collect();
        files.sort();
        files.into_iter().next()
    })
}

/// A Vulkan device without hardware. It makes pipelines and runs nothing.
///
/// Its objects live as long as the process: there is one, and the process ends with it.
pub(crate) struct Driver {
    // Dropped, it would unload the library whose functions the others hold.
    _vulkan: ash::Entry,
    device: ash::Device,
    executables: khr::pipeline_executable_properties::Device,
    /// `Mesa 22.3.6`.
    pub(crate) version: String,
    /// Whether it has cooperative matrices.
    pub(crate) has_matrices: bool,
}

impl Driver {
    /// Opens the driver of the file `icd`, made to believe that the GPU is `family` (a name of Mesa's: `navi21`).
    ///
    /// # Errors
    ///
    /// One line that says what is missing.
    ///
    /// # Safety
    ///
    /// It sets environment variables, so no other thread may run yet.
    pub(crate) unsafe fn open(icd: &Path, family: &str) -> Result<Driver, String> {
        let variables: [(&str, &std::ffi::OsStr); 4] = [
            ("VK_DRIVER_FILES", icd.as_os_str()),
            // Loaders before 1.3.207 know the variable by this name.
            ("VK_ICD_FILENAMES", icd.as_os_str()),
            ("RADV_FORCE_FAMILY", family.as_ref()),
            // What comes out of the cache has no statistics.
            ("MESA_SHADER_CACHE_DISABLE", "true".as_ref()),
        ];
        for (name, value) in variables {
            // SAFETY: the caller's promise: no other thread reads or writes the environment.
            unsafe { std::env::set_var(name, value) };
        }
        // SAFETY: loading the Vulkan loader runs its initialisers, which ask nothing of the caller.
        let vulkan = unsafe { ash::Entry::load() }.map_err(|error| {
            format!("no Vulkan loader ({error}): install libvulkan1 (Debian, Ubuntu) or your system's package of it")
        })?;
        // SAFETY: every structure below lives until the call that reads it returns, the handles are made here and are
        // used with the instance and device that they come from, and extensions and features are enabled only where
        // the driver says that it has them.
        unsafe { Driver::open_with(vulkan, icd, family) }
    }

    /// # Safety
    ///
    /// None beyond that the loader's functions are Vulkan's.
    unsafe fn open_with(vulkan: ash::Entry, icd: &Path, family: &str) -> Result<Driver, String> {
        let failed = |what: &str, error: vk::Result| format!("{}: {what}: {error}", icd.display());
        let application = vk::ApplicationInfo::default().api_version(vk::API_VERSION_1_3);
        let create = vk::InstanceCreateInfo::default().application_info(&application);
        // SAFETY: see `open`.
        let instance = unsafe { vulkan.create_instance(&create, None) }
            .map_err(|error| failed("no driver starts from this file", error))?;
        // SAFETY: see `open`.
        let devices = unsafe { instance.enumerate_physical_devices() }
            .map_err(|error| failed("asked for its devices", error))?;
        let physical = *devices.first().ok_or_else(|| {
            format!(
                "{} has no device for {family}: it is not Mesa's RADV, or too old",
                icd.display()
            )
        })?;

        let mut about = vk::PhysicalDeviceDriverProperties::default();
        let mut properties = vk::PhysicalDeviceProperties2::default().push_next(&mut about);
        // SAFETY: see `open`.
        unsafe { instance.get_physical_device_properties2(physical, &mut properties) };
        if properties.properties.api_version < vk::API_VERSION_1_3 {
            return Err(format!("{}: its Vulkan is older than 1.3", icd.display()));
        }
        let version = text(about.driver_info_as_c_str());
        if about.driver_id != vk::DriverId::MESA_RADV {
            return Err(format!("{} is not Mesa's RADV ({version})", icd.display()));
        }

        // SAFETY: see `open`.
        let offered = unsafe { instance.enumerate_device_extension_properties(physical) }
            .map_err(|error| failed("asked for its extensions", error))?;
        let offers = |name: &CStr| {
            offered
                .iter()
                .any(|extension| extension.extension_name_as_c_str() == Ok(name))
        };
        if !offers(khr::pipeline_executable_properties::NAME) {
            return Err(format!(
                "{version} lacks VK_KHR_pipeline_executable_properties"
            ));
        }
        let mut matrices = vk::PhysicalDeviceCooperativeMatrixFeaturesKHR::default();
        let mut features = vk::PhysicalDeviceFeatures2::default();
        if offers(khr::cooperative_matrix::NAME) {
            features = features.push_next(&mut matrices);
        }
        // SAFETY: see `open`.
        unsafe { instance.get_physical_device_features2(physical, &mut features) };
        let has_matrices = matrices.cooperative_matrix == vk::TRUE;

        // Features as wgpu enables them: the driver checks buffers by itself, which costs it some freedom.
        let mut extensions = vec![
            khr::pipeline_executable_properties::NAME.as_ptr(),
            ash::ext::robustness2::NAME.as_ptr(),
        ];
        if !offers(ash::ext::robustness2::NAME) {
            return Err(format!("{version} lacks VK_EXT_robustness2"));
        }
        let mut executable = vk::PhysicalDevicePipelineExecutablePropertiesFeaturesKHR::default()
            .pipeline_executable_info(true);
        let mut robust = vk::PhysicalDeviceRobustness2FeaturesEXT::default()
            .robust_buffer_access2(true)
            .robust_image_access2(true);
        let mut matrices =
            vk::PhysicalDeviceCooperativeMatrixFeaturesKHR::default().cooperative_matrix(true);
        let core = vk::PhysicalDeviceFeatures::default()
            .robust_buffer_access(true)
            .shader_int16(true);
        let mut v11 = vk::PhysicalDeviceVulkan11Features::default()
            .storage_buffer16_bit_access(true)
            .uniform_and_storage_buffer16_bit_access(true);
        let mut v12 = vk::PhysicalDeviceVulkan12Features::default()
            .shader_float16(true)
            .vulkan_memory_model(true)
            .vulkan_memory_model_device_scope(true);
        let mut v13 = vk::PhysicalDeviceVulkan13Features::default()
            .shader_zero_initialize_workgroup_memory(true)
            .shader_integer_dot_product(true);
        let priorities = [1.0f32];
        let queues = [vk::DeviceQueueCreateInfo::default().queue_priorities(&priorities)];
        if has_matrices {
            extensions.push(khr::cooperative_matrix::NAME.as_ptr());
        }
        let mut create = vk::DeviceCreateInfo::default()
            .queue_create_infos(&queues)
            .enabled_extension_names(&extensions)
            .enabled_features(&core)
            .push_next(&mut executable)
            .push_next(&mut robust)
            .push_next(&mut v11)
            .push_next(&mut v12)
            .push_next(&mut v13);
        if has_matrices {
            create = create.push_next(&mut matrices);
        }
        // SAFETY: see `open`.
        let device = unsafe { instance.create_device(physical, &create, None) }
            .map_err(|error| failed("opened", error))?;
        let executables = khr::pipeline_executable_properties::Device::new(&instance, &device);
        Ok(Driver {
            _vulkan: vulkan,
            device,
            executables,
            version,
            has_matrices,
        })
    }

    /// Makes a compute pipeline of a shader and reads what the driver says of it.
    ///
    /// # Errors
    ///
    /// What the driver refuses, in one line.
    pub(crate) fn compile(&self, shader: &Shader, entry: &str) -> Result<Compiled, String> {
        if shader.uses_matrices && !self.has_matrices {
            return Err(format!("{} has no cooperative matrices", self.version));
        }
        let mut made = Made::default();
        // SAFETY: the handles are this device's, made in `Made` and alive until they are destroyed there, once.
        let compiled = unsafe { self.compile_into(&mut made, shader, entry) };
        // SAFETY: as above; nothing was ever submitted, so nothing is in use.
        unsafe { made.destroy(&self.device) };
        compiled.map_err(|error| format!("the driver refuses the pipeline: {error}"))
    }

    /// # Safety
    ///
    /// `made` is destroyed afterwards, with this device.
    unsafe fn compile_into(
        &self,
        made: &mut Made,
        shader: &Shader,
        entry: &str,
    ) -> Result<Compiled, vk::Result> {
        let device = &self.device;
        let code = vk::ShaderModuleCreateInfo::default().code(&shader.words);
        // SAFETY: naga wrote the words from a validated module.
        made.shader = unsafe { device.create_shader_module(&code, None) }?;
        let groups = shader
            .bindings
            .iter()
            .map(|(group, ..)| group + 1)
            .max()
            .unwrap_or(0);
        for group in 0..groups {
            let entries: Vec<_> = shader
                .bindings
                .iter()
                .filter(|(own, ..)| *own == group)
                .map(|(_, binding, uniform)| {
                    vk::DescriptorSetLayoutBinding::default()
                        .binding(*binding)
                        .descriptor_count(1)
                        .descriptor_type(if *uniform {
                            vk::DescriptorType::UNIFORM_BUFFER
                        } else {
                            vk::DescriptorType::STORAGE_BUFFER
                        })
                        .stage_flags(vk::ShaderStageFlags::COMPUTE)
                })
                .collect();
            let create = vk::DescriptorSetLayoutCreateInfo::default().bindings(&entries);
            // SAFETY: `entries` outlives the call.
            made.sets
                .push(unsafe { device.create_descriptor_set_layout(&create, None) }?);
        }
        // What WGSL calls immediates; a kernel without them does not look at it.
        let immediates = [vk::PushConstantRange {
            stage_flags: vk::ShaderStageFlags::COMPUTE,
            offset: 0,
            size: 128,
        }];
        let create = vk::PipelineLayoutCreateInfo::default()
            .set_layouts(&made.sets)
            .push_constant_ranges(&immediates);
        // SAFETY: the set layouts are alive.
        made.layout = unsafe { device.create_pipeline_layout(&create, None) }?;
        let name = CString::new(entry).map_err(|_| vk::Result::ERROR_UNKNOWN)?;
        let stage = vk::PipelineShaderStageCreateInfo::default()
            .stage(vk::ShaderStageFlags::COMPUTE)
            .module(made.shader)
            .name(&name);
        let create = vk::ComputePipelineCreateInfo::default()
            .stage(stage)
            .layout(made.layout)
            .flags(
                vk::PipelineCreateFlags::CAPTURE_STATISTICS_KHR
                    | vk::PipelineCreateFlags::CAPTURE_INTERNAL_REPRESENTATIONS_KHR,
            );
        // SAFETY: module and layout are alive, and the layout has every binding of the module.
        let pipelines =
            unsafe { device.create_compute_pipelines(vk::PipelineCache::null(), &[create], None) };
        made.pipeline = pipelines.map_err(|(_, error)| error)?[0];

        let of_pipeline = vk::PipelineInfoKHR::default().pipeline(made.pipeline);
        // SAFETY: the pipeline was made with the flags that these three calls need.
        let executables = unsafe {
            self.executables
                .get_pipeline_executable_properties(&of_pipeline)
        }?;
        let wave = executables
            .first()
            .ok_or(vk::Result::ERROR_UNKNOWN)?
            .subgroup_size;
        let executable = vk::PipelineExecutableInfoKHR::default().pipeline(made.pipeline);
        // SAFETY: as above.
        let statistics = unsafe {
            self.executables
                .get_pipeline_executable_statistics(&executable)
        }?
        .iter()
        .filter(|statistic| statistic.format == vk::PipelineExecutableStatisticFormatKHR::UINT64)
        .map(|statistic| {
            // SAFETY: the union holds what `format` says.
            let value = unsafe { statistic.value.u64 };
            (text(statistic.name_as_c_str()), value)
        })
        .collect();
        // SAFETY: as above.
        let assembly = unsafe { self.assembly(&executable) }?;
        Ok(Compiled {
            wave,
            statistics,
            assembly,
        })
    }

    /// # Safety
    ///
    /// `executable` is of a pipeline made to capture its internal representations.
    unsafe fn assembly(
        &self,
        executable: &vk::PipelineExecutableInfoKHR<'_>,
    ) -> Result<String, vk::Result> {
        let read = self
            .executables
            .fp()
            .get_pipeline_executable_internal_representations_khr;
        let handle = self.device.handle();
        let mut count = 0;
        // SAFETY: without an array the call writes the number alone.
        unsafe { read(handle, executable, &mut count, std::ptr::null_mut()) }.result()?;
        let mut forms =
            vec![vk::PipelineExecutableInternalRepresentationKHR::default(); count as usize];
        // SAFETY: the array has `count` elements; without memory for the texts the call writes their sizes.
        unsafe { read(handle, executable, &mut count, forms.as_mut_ptr()) }.result()?;
        let mut texts: Vec<Vec<u8>> = forms.iter().map(|form| vec![0; form.data_size]).collect();
        for (form, bytes) in forms.iter_mut().zip(&mut texts) {
            form.p_data = bytes.as_mut_ptr().cast();
        }
        // SAFETY: each text has as many bytes as its form says.
        unsafe { read(handle, executable, &mut count, forms.as_mut_ptr()) }.result()?;
        let listing = forms
            .iter()
            .zip(texts)
            .find(|(form, _)| text(form.name_as_c_str()) == "Assembly");
        Ok(listing.map_or_else(String::new, |(_, bytes)| {
            String::from_utf8_lossy(&bytes)
                .trim_end_matches('\0')
                .to_owned()
        }))
    }
}

/// What belongs to one pipeline.
#[derive(Default)]
struct Made {
    shader: vk::ShaderModule,
    sets: Vec<vk::DescriptorSetLayout>,
    layout: vk::PipelineLayout,
    pipeline: vk::Pipeline,
}

impl Made {
    /// # Safety
    ///
    /// All of it is `device`'s and not in use. (A handle that was never made is null, which Vulkan ignores.)
    unsafe fn destroy(self, device: &ash::Device) {
        // SAFETY: the caller's promise.
        unsafe {
            device.destroy_pipeline(self.pipeline, None);
            device.destroy_pipeline_layout(self.layout, None);
            for set in self.sets {
                device.destroy_descriptor_set_layout(set, None);
            }
            device.destroy_shader_module(self.shader, None);
        }
    }
}

/// A name of the driver's.
fn text(name: Result<&CStr, std::ffi::FromBytesUntilNulError>) -> String {
    name.map_or_else(
        |_| String::new(),
        |name| name.to_string_lossy().into_owned(),
    )
}
