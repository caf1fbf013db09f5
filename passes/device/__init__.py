"""What the device adds: costs, workspaces, the allocator's blocks, an optimizer's step."""
