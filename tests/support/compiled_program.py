"""The texts of a small program, compiled for a TPU and for a GPU: a loop with a product of a module, a collective."""

PROGRAM = """HloModule jit_step, is_scheduled=true

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
metadata={op_name="jit(step)/transpose(jvp([Net]))/layers.0[Block]/layers.0.mlp[SwiGLU]/dot_general"}, \
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
  %added = f32[8]{0:T(128)} add(%vector, %vector), metadata={op_name="jit(step)/jvp()/add"}, \
backend_config={"window_config":{"estimated_cycles":"10"}}
  ROOT %sum = f32[8]{0:T(128)} all-reduce(%added), replica_groups={{0,1}}, to_apply=%add
}
"""

GPU_PROGRAM = """HloModule jit_step, is_scheduled=true

%gemm_computation (parameter_0: bf16[96,512], parameter_1: bf16[512,512]) -> bf16[96,512] {
  %parameter_0 = bf16[96,512]{1,0} parameter(0)
  %parameter_1 = bf16[512,512]{1,0} parameter(1)
  ROOT %dot.0 = bf16[96,512]{1,0} dot(%parameter_0, %parameter_1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (p: (bf16[96,512], bf16[512,512])) -> (bf16[96,512], bf16[512,512]) {
  %p = (bf16[96,512]{1,0}, bf16[512,512]{1,0}) parameter(0)
  %x = bf16[96,512]{1,0} get-tuple-element(%p), index=0
  %w = bf16[512,512]{1,0} get-tuple-element(%p), index=1
  %gemm = bf16[96,512]{1,0} fusion(%x, %w), kind=kCustom, calls=%gemm_computation, \
metadata={op_name="jit(step)/transpose(jvp([Net]))/layers.0[Block]/layers.0.mlp[SwiGLU]/dot_general"}, \
backend_config={"fusion_backend_config":{"kind":"__triton_nested_gemm_fusion"}}
  ROOT %t = (bf16[96,512]{1,0}, bf16[512,512]{1,0}) tuple(%gemm, %w)
}

%condition (q: (bf16[96,512], bf16[512,512])) -> pred[] {
  %q = (bf16[96,512]{1,0}, bf16[512,512]{1,0}) parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (arg: bf16[96,512], weight: bf16[512,512]) -> f32[8] {
  %arg = bf16[96,512]{1,0} parameter(0)
  %weight = bf16[512,512]{1,0} parameter(1)
  %start = (bf16[96,512]{1,0}, bf16[512,512]{1,0}) tuple(%arg, %weight)
  %loop = (bf16[96,512]{1,0}, bf16[512,512]{1,0}) while(%start), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
  %value = bf16[96,512]{1,0} get-tuple-element(%loop), index=0
  %attention = (bf16[96,512]{1,0}, u8[1000]{0}) custom-call(%value, %value, %value), \
custom_call_target="__cudnn$fmhaSoftmax", metadata={op_name="jit(step)/jvp([Net])/layers.0[Block]/attention"}
  %vector = f32[8]{0} constant({...})
  %sum-start = f32[8]{0} all-reduce-start(%vector), replica_groups={{0,1}}, to_apply=%add, \
backend_config={"collective_backend_config":{"is_sync":false}}
  ROOT %sum = f32[8]{0} all-reduce-done(%sum-start)
}
"""
