"""The text of a small compiled program: a loop with a matrix product of a module, an addition, and a collective."""

PROGRAM = """HloModule jit_step, is_scheduled=true

FileNames
1 "model.py"

FunctionNames
1 "train_step"
2 "Module._call_impl"
3 "Block.forward"
4 "SwiGLU.forward"
5 "linear"

FileLocations
1 {file_name_id=1 function_name_id=1 line=1 end_line=1}
2 {file_name_id=1 function_name_id=2 line=2 end_line=2}
3 {file_name_id=1 function_name_id=3 line=3 end_line=3}
4 {file_name_id=1 function_name_id=4 line=4 end_line=4}
5 {file_name_id=1 function_name_id=5 line=5 end_line=5}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=3}
4 {file_location_id=2 parent_frame_id=4}
5 {file_location_id=4 parent_frame_id=5}
6 {file_location_id=5 parent_frame_id=6}

%fused_product (a: bf16[97,512], b: bf16[512,512]) -> bf16[97,512] {
  %a = bf16[97,512]{1,0:T(8,128)(2,1)} parameter(0)
  %b = bf16[512,512]{1,0:T(8,128)(2,1)} parameter(1)
  ROOT %c = bf16[97,512]{1,0:T(8,128)(2,1)} convolution(%a, %b), dim_labels=bf_io->bf
}

%body (p: (bf16[97,512], s32[])) -> (bf16[97,512], s32[]) {
  %p = (bf16[97,512]{1,0:T(8,128)(2,1)}, s32[]{:T(128)}) parameter(0)
  %x = bf16[97,512]{1,0:T(8,128)(2,1)} get-tuple-element(%p), index=0
  %n = s32[]{:T(128)} get-tuple-element(%p), index=1
  %w = bf16[512,512]{1,0:T(8,128)(2,1)S(3)} constant({...})
  %product = bf16[97,512]{1,0:T(8,128)(2,1)} fusion(%x, %w), kind=kOutput, calls=%fused_product, \
metadata={op_name="jit(step)/transpose(jvp())/dot_general" stack_frame_id=6}, \
backend_config={"window_config":{"estimated_cycles":"1000"}}
  ROOT %t = (bf16[97,512]{1,0:T(8,128)(2,1)}, s32[]{:T(128)}) tuple(%product, %n)
}

%condition (q: (bf16[97,512], s32[])) -> pred[] {
  %q = (bf16[97,512]{1,0:T(8,128)(2,1)}, s32[]{:T(128)}) parameter(0)
  ROOT %true = pred[]{:T(512)} constant(true)
}

ENTRY %main (arg: bf16[97,512]) -> f32[8] {
  %arg = bf16[97,512]{1,0:T(8,128)(2,1)} parameter(0)
  %zero = s32[]{:T(128)} constant(0)
  %start = (bf16[97,512]{1,0:T(8,128)(2,1)}, s32[]{:T(128)}) tuple(%arg, %zero)
  %loop = (bf16[97,512]{1,0:T(8,128)(2,1)}, s32[]{:T(128)}) while(%start), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
  %vector = f32[8]{0:T(128)} constant({...})
  %added = f32[8]{0:T(128)} add(%vector, %vector), metadata={op_name="jit(step)/jvp()/add" stack_frame_id=1}, \
backend_config={"window_config":{"estimated_cycles":"10"}}
  ROOT %sum = f32[8]{0:T(128)} all-reduce(%added), replica_groups={{0,1}}, to_apply=%add
}
"""
