// Needs CUDA's headers.
#include "load.h"
#include "loaded_function.h"
#include "products.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>
#include <torch/version.h>

#include <cublasLt.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace brigade::kernels {

namespace {

// Algorithms that are measured. Those that follow in cuBLASLt's order are seldom faster, and each costs some slow runs.
constexpr int kMostAlgorithms = 4;

void check_status(cublasStatus_t status, const char* operation) {
  TORCH_CHECK(status == CUBLAS_STATUS_SUCCESS, operation, " failed with cuBLAS status ", static_cast<int>(status));
}

// The functions of cuBLASLt that products call.
struct Library {
  decltype(&cublasLtMatmul) matmul = BRIGADE_LOADED(cublasLtMatmul);
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic = BRIGADE_LOADED(cublasLtMatmulAlgoGetHeuristic);
  decltype(&cublasLtMatmulDescCreate) create_description = BRIGADE_LOADED(cublasLtMatmulDescCreate);
  decltype(&cublasLtMatmulDescDestroy) destroy_description = BRIGADE_LOADED(cublasLtMatmulDescDestroy);
  decltype(&cublasLtMatmulDescSetAttribute) set_description = BRIGADE_LOADED(cublasLtMatmulDescSetAttribute);
  decltype(&cublasLtMatrixLayoutCreate) create_layout = BRIGADE_LOADED(cublasLtMatrixLayoutCreate);
  decltype(&cublasLtMatrixLayoutDestroy) destroy_layout = BRIGADE_LOADED(cublasLtMatrixLayoutDestroy);
  decltype(&cublasLtMatmulPreferenceCreate) create_preference = BRIGADE_LOADED(cublasLtMatmulPreferenceCreate);
  decltype(&cublasLtMatmulPreferenceDestroy) destroy_preference = BRIGADE_LOADED(cublasLtMatmulPreferenceDestroy);
  decltype(&cublasLtMatmulPreferenceSetAttribute) set_preference =
      BRIGADE_LOADED(cublasLtMatmulPreferenceSetAttribute);
  decltype(&cublasLtGetVersion) version = BRIGADE_LOADED(cublasLtGetVersion);
  decltype(&cudaStreamIsCapturing) is_capturing = BRIGADE_LOADED(cudaStreamIsCapturing);
  decltype(&cudaDriverGetVersion) driver_version = BRIGADE_LOADED(cudaDriverGetVersion);
};

cudaDataType_t data_type(at::ScalarType type) {
  switch (type) {
    case at::kBFloat16:
      return CUDA_R_16BF;
    case at::kHalf:
      return CUDA_R_16F;
    case at::kFloat:
      return CUDA_R_32F;
    default:
      TORCH_CHECK(false, "products have no epilogue in ", type);
  }
}

cublasLtEpilogue_t epilogue_of(Epilogue epilogue) {
  // Matrices of cuBLASLt are column-major: a product of row-major ones is that of their transposes in reverse order, so
  // its A is the right factor and its B the left one.
  switch (epilogue) {
    case Epilogue::kGeluBias:
      return CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
    case Epilogue::kGeluGradient:
      return CUBLASLT_EPILOGUE_DGELU_BGRAD;
    case Epilogue::kSumsOfLeft:
      return CUBLASLT_EPILOGUE_BGRADB;
    case Epilogue::kSumsOfRight:
      return CUBLASLT_EPILOGUE_BGRADA;
  }
  TORCH_CHECK(false, "there is no such epilogue");
}

// A column-major matrix of cuBLASLt with the memory of a row-major one, [rows, columns].
class Layout {
 public:
  Layout(const Library& library, at::ScalarType type, int64_t rows, int64_t columns, int64_t leading)
      : library_(library) {
    check_status(
        library.create_layout(
            &layout_, data_type(type), static_cast<uint64_t>(columns), static_cast<uint64_t>(rows), leading),
        "a matrix layout");
  }
  ~Layout() {
    library_.destroy_layout(layout_);
  }
  Layout(const Layout&) = delete;
  Layout& operator=(const Layout&) = delete;

  cublasLtMatrixLayout_t get() const {
    return layout_;
  }

 private:
  const Library& library_;
  cublasLtMatrixLayout_t layout_ = nullptr;
};

class Preference {
 public:
  Preference(const Library& library, size_t workspace) : library_(library) {
    check_status(library.create_preference(&preference_), "a preference");
    set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace);
    // What `takes_epilogue` asks of factors, and libtorch's allocator gives for results.
    constexpr uint32_t kAlignment = 16;
    for (const auto attribute :
         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
      set(attribute, kAlignment);
    }
  }
  ~Preference() {
    library_.destroy_preference(preference_);
  }
  Preference(const Preference&) = delete;
  Preference& operator=(const Preference&) = delete;

  cublasLtMatmulPreference_t get() const {
    return preference_;
  }

 private:
  template <typename Value>
  void set(cublasLtMatmulPreferenceAttributes_t attribute, const Value& value) {
    check_status(library_.set_preference(preference_, attribute, &value, sizeof(value)), "a preference");
  }

  const Library& library_;
  cublasLtMatmulPreference_t preference_ = nullptr;
};

// The description of a product. Pointers, which are part of it, are set by each call: one that threads do not share.
class Description {
 public:
  explicit Description(const Library& library) : library_(library) {
    check_status(
        library.create_description(&description_, CUBLAS_COMPUTE_32F, CUDA_R_32F), "the description of a product");
  }
  ~Description() {
    library_.destroy_description(description_);
  }
  Description(const Description&) = delete;
  Description& operator=(const Description&) = delete;

  template <typename Value>
  void set(cublasLtMatmulDescAttributes_t attribute, const Value& value) {
    check_status(
        library_.set_description(description_, attribute, &value, sizeof(value)), "the description of a product");
  }
  cublasLtMatmulDesc_t get() const {
    return description_;
  }

 private:
  const Library& library_;
  cublasLtMatmulDesc_t description_ = nullptr;
};

// The layout of a factor: as it lies in memory, and if that is its transpose.
struct Factor {
  bool is_transposed;
  Layout layout;

  Factor(const Library& library, const at::Tensor& t)
      : is_transposed(t.stride(1) != 1),
        layout(
            library, t.scalar_type(), t.size(is_transposed ? 1 : 0), t.size(is_transposed ? 0 : 1),
            t.stride(is_transposed ? 1 : 0)) {}
};

class Plan : public ProductPlan {
 public:
  Plan(const Library& library, const Product& product)
      : library_(library),
        left_(library, product.left),
        right_(library, product.right),
        output_(library, product.output_type, product.left.size(0), product.right.size(1), product.right.size(1)) {
    Description description(library);
    describe(description, product);
    // The judgement does not read them, but depends on their alignment, and on their presence in some versions.
    const void* const pointer = product.left.const_data_ptr();
    description.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, pointer);
    if (has_matrix(product.epilogue)) {
      description.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, pointer);
    }
    const Preference preference(library, at::cuda::getCUDABlasLtWorkspaceSize());
    int count = 0;
    found_.resize(kMostAlgorithms);
    const auto status = library.heuristic(
        at::cuda::getCurrentCUDABlasLtHandle(), description.get(), right_.layout.get(), left_.layout.get(),
        output_.get(), output_.get(), preference.get(), kMostAlgorithms, found_.data(), &count);
    // It also answers so where it has no algorithm.
    found_.resize(status == CUBLAS_STATUS_SUCCESS ? count : 0);
    const auto is_bad = [](const auto& found) { return found.state != CUBLAS_STATUS_SUCCESS; };
    found_.erase(std::remove_if(found_.begin(), found_.end(), is_bad), found_.end());
  }

  int algorithms() override {
    return static_cast<int>(found_.size());
  }

  void run(const Product& product, int algorithm, const ProductResult& result) override {
    const c10::DeviceGuard guard(product.left.device());
    Description description(library_);
    describe(description, product);
    const auto pointer = [&](const at::Tensor& t) -> const void* { return t.const_data_ptr(); };
    switch (product.epilogue) {
      case Epilogue::kGeluBias:
        description.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, pointer(product.operand));
        description.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, pointer(result.other));
        break;
      case Epilogue::kGeluGradient:
        description.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, pointer(result.other));
        description.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, pointer(product.operand));
        break;
      default:
        description.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, pointer(result.other));
    }
    const float one = 1, zero = 0;
    void* const output = result.output.mutable_data_ptr();
    check_status(
        library_.matmul(
            at::cuda::getCurrentCUDABlasLtHandle(), description.get(), &one, product.right.const_data_ptr(),
            right_.layout.get(), product.left.const_data_ptr(), left_.layout.get(), &zero, output, output_.get(),
            output, output_.get(), &found_.at(algorithm).algo, at::cuda::getCUDABlasLtWorkspace(),
            at::cuda::getCUDABlasLtWorkspaceSize(), c10::cuda::getCurrentCUDAStream().stream()),
        "cublasLtMatmul");
  }

 private:
  static bool has_matrix(Epilogue epilogue) {
    return epilogue == Epilogue::kGeluBias || epilogue == Epilogue::kGeluGradient;
  }

  void describe(Description& description, const Product& product) const {
    const auto operation = [](const Factor& factor) { return factor.is_transposed ? CUBLAS_OP_T : CUBLAS_OP_N; };
    description.set(CUBLASLT_MATMUL_DESC_TRANSA, operation(right_));
    description.set(CUBLASLT_MATMUL_DESC_TRANSB, operation(left_));
    description.set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue_of(product.epilogue));
    if (has_matrix(product.epilogue)) {
      // Of the transpose, whose columns are the output's rows.
      description.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, product.right.size(1));
    }
  }

  const Library& library_;
  const Factor left_, right_;
  const Layout output_;
  std::vector<cublasLtMatmulHeuristicResult_t> found_;
};

class LibraryProducts : public Products {
 public:
  explicit LibraryProducts(c10::DeviceIndex device) : device_(device) {}

  bool is_recording() override {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const auto error = library_.is_capturing(c10::cuda::getCurrentCUDAStream(device_).stream(), &status);
    return error != cudaSuccess || status != cudaStreamCaptureStatusNone;
  }

  std::string identity() override {
    const auto& properties = *at::cuda::getDeviceProperties(device_);
    int driver = 0;
    library_.driver_version(&driver);
    const auto& hooks = at::detail::getCUDAHooks();
    const long cudnn = hooks.hasCuDNN() ? hooks.versionCuDNN() : 0;
    return std::string(properties.name) + ", " + std::to_string(properties.multiProcessorCount) +
        " multiprocessors, driver " + std::to_string(driver) + ", cuBLASLt " + std::to_string(library_.version()) +
        ", cuDNN " + std::to_string(cudnn) + ", libtorch " TORCH_VERSION;
  }

 private:
  std::unique_ptr<ProductPlan> plan(const Product& product) override {
    const c10::DeviceGuard guard(product.left.device());
    return std::make_unique<Plan>(library_, product);
  }

  const c10::DeviceIndex device_;
  const Library library_;
};

} // namespace

std::unique_ptr<Products> library_products(c10::DeviceIndex device) {
  return std::make_unique<LibraryProducts>(device);
}

} // namespace brigade::kernels
