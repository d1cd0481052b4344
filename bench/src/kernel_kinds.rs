//! Kinds of GPU kernels, by their names: those of libtorch, its libraries, Triton and Brigade.

/// Kind of a kernel or an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KernelKind {
    Products,
    Attention,
    Convolutions,
    Normalisation,
    Loss,
    Optimizer,
    Copies,
    Other,
}

impl KernelKind {
    pub(crate) const ALL: [Self; 8] = [
        Self::Products,
        Self::Attention,
        Self::Convolutions,
        Self::Normalisation,
        Self::Loss,
        Self::Optimizer,
        Self::Copies,
        Self::Other,
    ];

    /// Returns the kind of a kernel; an operation of a CPU has one by the same words.
    ///
    /// A kernel of Triton that several operations are fused into belongs to the first kind of which it has a word.
    pub(crate) fn of(name: &str) -> Self {
        // Otherwise casts would be taken for convolutions.
        let name = name.to_lowercase().replace("convert", "");
        if name.starts_with("triton_tem") {
            return Self::Products;
        }
        if let Some((_, fused)) =
            name.split_once("triton_").and_then(|it| it.1.split_once("fused_"))
            && fused.split('_').all(|word| word.parse::<u32>().is_ok() || COPIES.contains(&word))
        {
            return Self::Copies;
        }
        let found = WORDS.iter().find(|(kind, words)| {
            // Triton's kernels beside a product have its name; its own begin with `triton_tem`.
            let fits =
                !name.starts_with("triton_") || !matches!(kind, Self::Products | Self::Copies);
            fits && words.iter().any(|word| name.contains(word))
        });
        found.map_or(Self::Other, |(kind, _)| *kind)
    }
}

/// Words of each kind. The order matters: kernels of attention and convolutions also have words of products.
const WORDS: [(KernelKind, &[&str]); 7] = [
    (KernelKind::Optimizer, &["adam", "sgd", "multi_tensor"]),
    (KernelKind::Attention, &["attention", "flash", "fmha", "sdpa"]),
    (KernelKind::Convolutions, &["conv", "fprop", "dgrad", "wgrad"]),
    (KernelKind::Loss, &["cross_entropy", "softmax", "nll_loss", "logsumexp"]),
    (
        KernelKind::Normalisation,
        &["norm", "rowwisemoments", "gammabeta", "statistics", "finish_gradients"],
    ),
    (
        KernelKind::Products,
        &["gemm", "gemv", "nvjet", "cutlass", "cublas", "splitk", "::mm", "addmm", "bmm", "linear"],
    ),
    (
        KernelKind::Copies,
        &["memcpy", "memset", "copy", "clone", "catarray", "aten::cat", "nchwtonhwc", "nhwctonchw"],
    ),
];

/// Words in the names of Triton's kernels that only move values.
const COPIES: [&str; 9] =
    ["", "to", "copy", "clone", "cat", "view", "transpose", "permute", "constant"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_have_their_kinds() {
        use KernelKind as Kind;
        let names = [
            ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopB_bias_TNN", Kind::Products),
            (
                "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_64x64>",
                Kind::Products,
            ),
            ("triton_tem_fused__to_copy_mm_3", Kind::Products),
            ("brigade::linear_backward", Kind::Products),
            ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<>", Kind::Attention),
            ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", Kind::Attention),
            ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", Kind::Attention),
            (
                "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc",
                Kind::Convolutions,
            ),
            ("aten::convolution_backward", Kind::Convolutions),
            ("norm_residual_2_backward", Kind::Normalisation),
            ("finish_statistics", Kind::Normalisation),
            ("triton_per_fused__to_copy_add_native_layer_norm_0", Kind::Normalisation),
            (
                "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernel",
                Kind::Normalisation,
            ),
            ("cross_entropy", Kind::Loss),
            ("triton_red_fused__log_softmax_nll_loss_forward_11", Kind::Loss),
            (
                "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMath>",
                Kind::Optimizer,
            ),
            ("Memcpy DtoD (Device -> Device)", Kind::Copies),
            ("void at::native::elementwise_kernel<direct_copy_kernel_cuda>", Kind::Copies),
            ("triton_poi_fused__to_copy_4", Kind::Copies),
            ("triton_poi_fused__to_copy_addmm_gelu_8", Kind::Other),
            ("aten::convert_element_type_add", Kind::Other),
            ("void at::native::_scatter_gather_elementwise_kernel", Kind::Other),
            ("void at::native::(anonymous namespace)::CatArrayBatchedCopy", Kind::Copies),
            ("aten::gelu", Kind::Other),
        ];
        for (name, kind) in names {
            assert_eq!(KernelKind::of(name), kind, "{name}");
        }
    }
}
