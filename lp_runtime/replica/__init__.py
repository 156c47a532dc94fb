"""A replica: model loading, joining the group, requests from options."""
