// The wheel has no Gloo headers: see ../README.md. ProcessGroupGloo.hpp uses nothing of this one.
#pragma once
