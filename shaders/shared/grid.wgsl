// The linear number of this workgroup in a grid that was folded because an axis may hold 65535 groups at most (`fold` in
// src/gpu/pipeline.rs lays it out), of a dispatch that begins at params.first_group because one of all groups would take too long.
// Groups past the last one return at once: the number is the same for every invocation of a group, so no barrier is split.
fn workgroup_number(group: vec3<u32>, groups: vec3<u32>) -> u32 {
    return params.first_group + group.x + groups.x * (group.y + groups.y * group.z);
}
