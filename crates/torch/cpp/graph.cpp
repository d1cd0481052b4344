// The feature cuda. Needs CUDA's headers.
#include "brigade-torch/src/bridge.rs.h"

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>

namespace brigade {

struct GraphState {
  c10::DeviceIndex device;
  at::cuda::CUDAGraph graph;
};

Graph::Graph(std::unique_ptr<GraphState> state) : state(std::move(state)) {}

Graph::~Graph() {
  c10::cuda::OptionalCUDAGuard on(c10::Device(c10::kCUDA, state->device));
  state.reset();
}

std::unique_ptr<Graph> graph_begin(int32_t gpu, const Graph* shared) {
  const auto device = static_cast<c10::DeviceIndex>(gpu);
  c10::cuda::CUDAGuard on(device);
  auto out = std::make_unique<Graph>(std::make_unique<GraphState>());
  out->state->device = device;
  // Only this thread's calls can spoil the recording: others copy batches and ask for events meanwhile.
  const auto pool = shared != nullptr ? shared->state->graph.pool() : at::cuda::MempoolId_t{0, 0};
  out->state->graph.capture_begin(pool, cudaStreamCaptureModeThreadLocal);
  return out;
}

void graph_end(Graph& graph) {
  graph.state->graph.capture_end();
}

void graph_replay(Graph& graph) {
  c10::cuda::CUDAGuard on(graph.state->device);
  graph.state->graph.replay();
}

} // namespace brigade
