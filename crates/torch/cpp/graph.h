// CUDA graphs: what a stream was given, recorded once and given again in one call.
#pragma once

#include "rust/cxx.h"

#include <cstdint>
#include <memory>

namespace brigade {

struct GraphState;

// The rest needs CUDA's headers.
struct Graph {
  explicit Graph(std::unique_ptr<GraphState> state);
  ~Graph();

  std::unique_ptr<GraphState> state;
};

// Begins to record what this thread's current stream is given, which may not be the default one. Nothing of it
// runs. `shared`: a graph whose memory this one may use too, since they are never replayed at the same time.
std::unique_ptr<Graph> graph_begin(int32_t gpu, const Graph* shared);
void graph_end(Graph& graph);
void graph_replay(Graph& graph);

} // namespace brigade
