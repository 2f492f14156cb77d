"""Images and manifests of the services, and what checks them."""
