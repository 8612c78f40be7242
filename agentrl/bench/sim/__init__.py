"""`agentrl bench sim`: what a simulated fleet says about policies, beside what was published. One file per question."""
