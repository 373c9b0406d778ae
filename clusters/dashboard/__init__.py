"""A web page that shows a live cluster. It reads the state of the cluster and changes nothing."""
