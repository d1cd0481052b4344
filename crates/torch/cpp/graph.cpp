// The feature cuda. Needs CUDA's headers.
#include "brigade-torch/src/bridge.rs.h"

#include <ATen/ATen.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/version.h>

#include <map>
#include <mutex>

namespace brigade {

struct GraphState {
  c10::DeviceIndex device;
  cudaStream_t stream;
  // Chosen here, to give it back where a recording fails and the graph does not say which it was.
  at::cuda::MempoolId_t pool;
  at::cuda::CUDAGraph graph;
};

namespace {

// Not CUDAGuard, whose functions call CUDA's runtime: a program that is not optimised would have to be linked with it.
c10::Device gpu(c10::DeviceIndex index) {
  return {c10::kCUDA, index};
}

constexpr auto kMode = cudaStreamCaptureModeThreadLocal;

template <typename Action>
void quietly(const Action& action) {
  try {
    action();
  } catch (const c10::Error&) {
  }
}

// What CUDAGraph leaves behind when a recording fails: allocators that take this stream's memory from the graph's pool,
// put off what other streams free, and read the graph's address at the next recording; and, before libtorch 2.13, a
// generator that refuses numbers outside of a recording. Parts that are right already throw.
void abandon(const GraphState& state) {
  auto* host = at::getHostAllocator(at::kCUDA);
  quietly([&] { c10::cuda::CUDACachingAllocator::endAllocateToPool(state.device, state.pool); });
  quietly([&] { host->end_allocate_to_pool(state.pool); });
  quietly([&] { c10::cuda::CUDACachingAllocator::releasePool(state.device, state.pool); });
  quietly([&] { host->release_pool(state.pool); });
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13
  quietly([&] {
    // Only a recording that ends well takes the generator out.
    at::cuda::CUDAGraph other;
    other.capture_begin({0, 0}, kMode);
    at::zeros({1}, at::device(gpu(state.device)));
    other.capture_end();
  });
#endif
}

// The entries of one stream, while a graph is dropped.
class KeptWorkspaces {
 public:
  KeptWorkspaces(at::cuda::WorkspaceMapWithMutex& all, cudaStream_t stream) : all_(all) {
    const std::unique_lock lock(all_.mutex);
    for (auto it = all_.map.begin(); it != all_.map.end();) {
      const auto next = std::next(it);
      if (std::get<1>(it->first) == static_cast<void*>(stream)) {
        kept_.insert(all_.map.extract(it));
      }
      it = next;
    }
  }

  ~KeptWorkspaces() {
    const std::unique_lock lock(all_.mutex);
    all_.map.merge(kept_);
  }

  KeptWorkspaces(const KeptWorkspaces&) = delete;
  KeptWorkspaces& operator=(const KeptWorkspaces&) = delete;

 private:
  at::cuda::WorkspaceMapWithMutex& all_;
  decltype(at::cuda::WorkspaceMapWithMutex::map) kept_;
};

// A recording has the host wait, once: no mistake of a step.
class WaitingAllowed {
 public:
  WaitingAllowed() : before_(c10::cuda::warning_state().get_sync_debug_mode()) {
    c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_DISABLED);
  }

  ~WaitingAllowed() {
    c10::cuda::warning_state().set_sync_debug_mode(before_);
  }

  WaitingAllowed(const WaitingAllowed&) = delete;
  WaitingAllowed& operator=(const WaitingAllowed&) = delete;

 private:
  c10::cuda::SyncDebugMode before_;
};

} // namespace

Graph::Graph(std::unique_ptr<GraphState> state) : state(std::move(state)) {}

Graph::~Graph() {
  const c10::DeviceGuard on(gpu(state->device));
  // libtorch 2.13 drops cuBLAS's workspaces of the stream with a graph, and other graphs of the stream write to them.
  const KeptWorkspaces blas(at::cuda::cublas_handle_stream_to_workspace(), state->stream);
  const KeptWorkspaces blas_lt(at::cuda::cublaslt_handle_stream_to_workspace(), state->stream);
  state.reset();
}

std::unique_ptr<Graph> graph_begin(int32_t index, const Graph* shared) {
  const auto device = static_cast<c10::DeviceIndex>(index);
  const c10::DeviceGuard on(gpu(device));
  const WaitingAllowed waits;
  if (shared == nullptr) {
    // What earlier steps have left in the cache is of no use to the graph's own pool, and libtorch gives nothing back
    // while it records: also not while another thread does, which is an error then.
    c10::cuda::device_synchronize();
    quietly([] { c10::cuda::CUDACachingAllocator::emptyCache(); });
  }
  auto state = std::make_unique<GraphState>();
  state->device = device;
  state->stream = c10::cuda::getCurrentCUDAStream(device).stream();
  state->pool = shared != nullptr ? shared->state->pool : at::cuda::graph_pool_handle();
  try {
    // Only this thread's calls can spoil the recording: others copy batches and ask for events meanwhile.
    state->graph.capture_begin(state->pool, kMode);
  } catch (...) {
    abandon(*state);
    throw;
  }
  return std::make_unique<Graph>(std::move(state));
}

void graph_end(Graph& graph) {
  auto& state = *graph.state;
  const c10::DeviceGuard on(gpu(state.device));
  try {
    state.graph.capture_end();
  } catch (...) {
    bool ended = true;
    try {
      state.graph.pool(); // throws where the recording is not complete
    } catch (const c10::Error&) {
      ended = false;
    }
    if (!ended) {
      abandon(state);
    }
    throw;
  }
}

void graph_replay(Graph& graph) {
  const c10::DeviceGuard on(gpu(graph.state->device));
  graph.state->graph.replay();
}

} // namespace brigade
